"""The long walk of recovery: one by one where records are few, in columns where they are many.

`scan` reads a record, `sweep` a piece of the log at once with NumPy; both accept exactly the same
records. A start after an orderly stop looks at a handful of records and does without NumPy.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from sluicemq.store.commitlog import BLANK_BYTES, CommitLog
from sluicemq.store.scan import DELAYS_MS, Scanned, is_blank, read_counting

if TYPE_CHECKING:
    from sluicemq.store.sweep import Sweep

SINGLES_FIRST: Final = 2000
"""A walk shorter than this is over before NumPy would be imported."""
SINGLES_BETWEEN: Final = 32
"""So many are read one by one where columns do not help, more each time, up to the number above."""


def sweep_records(
    log: CommitLog, start: int, *, check_crc: bool = True, delays_ms: Sequence[int] = DELAYS_MS
) -> "Iterator[Scanned | Sweep]":
    """As `scan_records`, many records at a time where there are many (`sweep`).

    The first ones come singly: a short walk, the usual one, does without NumPy. `delays_ms` are
    the delays of level 1, 2, … (messageDelayLevel), for the units of delayed messages.
    """
    singles, between = SINGLES_FIRST, SINGLES_BETWEEN
    position = start
    while (segment := log.segments.at(position)) is not None:
        view, base, size = segment.view(), segment.base, segment.size
        at = position - base
        while size - at >= BLANK_BYTES and not is_blank(view, at):
            if not singles:
                columns = _sweep(log, view, at, base, check_crc, delays_ms)
                if columns is not None:
                    yield columns
                    at = columns.end - base
                is_worth_it = columns is not None and columns.count >= SINGLES_BETWEEN
                between = SINGLES_BETWEEN if is_worth_it else min(2 * between, SINGLES_FIRST)
                singles = 0 if is_worth_it else between
                continue
            scanned = read_counting(log, view, at, base, check_crc=check_crc)
            if scanned is None:
                return
            yield scanned
            at += scanned.size_bytes
            singles -= 1
        position = segment.end


def _sweep(
    log: CommitLog,
    view: memoryview,
    at: int,
    base: int,
    check_crc: bool,
    delays_ms: Sequence[int],
) -> "Sweep | None":
    from sluicemq.store.sweep import sweep_piece  # noqa: PLC0415 - NumPy for long walks only

    return sweep_piece(
        view, at, base, check_crc=check_crc, requires_checksum=log.requires_checksum,
        delays_ms=delays_ms,
    )  # fmt: skip
