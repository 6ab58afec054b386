"""Check whether the timer wheel and the timer log agree with each other.

After a crash, the checksums in the identity file say nothing. But wheel and log contain the same
facts twice: the units of a slot form a chain in which each unit refers to the one before, and the
slot in the wheel refers to both ends. Therefore a file that is zeroed, is older than the other one,
or has a flipped bit is found without reading a message.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sluicemq.record.layout import RECORD_HEAD
from sluicemq.store.timers.files import (
    MAGIC_DEFAULT,
    MAGIC_DELETE,
    MAGIC_ROLL,
    NO_UNIT,
    SLOTS,
    UNIT_BYTES,
    TimerLog,
    TimerUnit,
    TimerWheel,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

READ_BYTES_MAX: Final = 1 << 30
"""The maximum number of bytes at the end of a timer log that `find_disagreement` reads.

A unit before them is checked when its slot is loaded.
"""
_UNITS_AT_ONCE: Final = 1 << 15
_HEAD: Final = RECORD_HEAD.struct_of("size", "queue_offset", "physical_offset")
_UNIT_DTYPE: Final = [
    ("unit_bytes", ">i4"),
    ("previous", ">i8"),
    ("magic", ">i4"),
    ("write_ms", ">i8"),
    ("delay_ms", ">i4"),
    ("position", ">i8"),
    ("size", ">i4"),
    ("hash", ">i4"),
    ("zero", ">i8"),
]


def find_disagreement(
    wheel: TimerWheel, log: TimerLog, from_ms: int, precision_ms: int
) -> str | None:
    """Compare wheel and timer log for the slots from `from_ms` on; describe the first difference.

    The wheel has the last unit (log entry) of each slot; each unit names the one before it in its
    slot. Both must agree. Only the last READ_BYTES_MAX of the log are read.

    Return a phrase such as "the unit at 52 of the timer log is damaged". Return None if wheel and
    log agree, or if neither exists. Raises OSError.
    """
    if log.end == log.start == 0 and not wheel.exists:
        return None
    first_second = from_ms // precision_ms
    log_start = max(log.start, log.end - READ_BYTES_MAX)
    try:
        live = _read_live_units(log, log_start, first_second, precision_ms)
        end_by_second = _check_chains(live, log_start, first_second, precision_ms)
        _compare_with_wheel(wheel, end_by_second, log_start, first_second, precision_ms)
    except _DisagreementError as disagreement:
        return str(disagreement)
    return None


class _DisagreementError(Exception):
    """What is wrong with wheel and log, as a phrase."""


class _LiveUnits(NamedTuple):
    """The units of a part of the log that are not due before the compared slots.

    The arrays contain their slots divided by the precision, their positions, and the positions of
    the previous units.
    """

    seconds: "NDArray[np.int64]"
    positions: "NDArray[np.int64]"
    previous: "NDArray[np.int64]"


def _read_live_units(
    log: TimerLog, log_start: int, first_second: int, precision_ms: int
) -> _LiveUnits:
    """Return the units from position `log_start` on that belong to slot `first_second` or later.

    A slot number is a time divided by `precision_ms`. The units are sorted by slot, and within a
    slot in the order of the log.

    Raises _DisagreementError if a unit is damaged or the log ends before `log.end`, and OSError.
    """
    import numpy as np  # noqa: PLC0415 - only after a crash, and only with timers

    parts: list[_LiveUnits] = []
    read_end = log_start
    for position, units in iter_unit_arrays(log, log_start, log.end):
        damaged = np.flatnonzero(~_are_valid(units))
        if len(damaged):
            unit_position = position + int(damaged[0]) * UNIT_BYTES
            raise _DisagreementError(f"the unit at {unit_position} of the timer log is damaged")
        parts.append(_select_live_units(units, position, first_second, precision_ms))
        read_end = position + len(units) * UNIT_BYTES
    if read_end < log.end:
        raise _DisagreementError(
            f"the timer log has no unit at {read_end}, and should end at {log.end}"
        )
    return _join_and_sort(parts)


def _select_live_units(
    units: "NDArray[Any]", position: int, first_second: int, precision_ms: int
) -> _LiveUnits:
    """Select the units that belong to slot number `first_second` or later.

    `units` is a structured array, whose first unit is at `position` of the timer log. A slot number
    is a time divided by `precision_ms`.
    """
    import numpy as np  # noqa: PLC0415 - see above

    seconds = (units["write_ms"].astype(np.int64) + units["delay_ms"]) // precision_ms
    indices = np.flatnonzero(seconds >= first_second)
    previous = units["previous"][indices].astype(np.int64)
    return _LiveUnits(seconds[indices], position + indices * UNIT_BYTES, previous)


def _join_and_sort(parts: "Sequence[_LiveUnits]") -> _LiveUnits:
    """Join the parts, and sort the units by slot, and within a slot in the order of the log."""
    import numpy as np  # noqa: PLC0415 - see above

    if not parts:
        nothing = np.empty(0, np.int64)
        return _LiveUnits(nothing, nothing, nothing)
    seconds = np.concatenate([part.seconds for part in parts])
    positions = np.concatenate([part.positions for part in parts])
    previous = np.concatenate([part.previous for part in parts])
    order = np.argsort(seconds, kind="stable")
    return _LiveUnits(seconds[order], positions[order], previous[order])


def _check_chains(
    live: _LiveUnits, log_start: int, first_second: int, precision_ms: int
) -> dict[int, int]:
    """Check that the units of each slot form a chain. Return the position of each slot's last unit.

    Each unit must name the position of the unit before it in the same slot. The first one must have
    NO_UNIT, or a position before `log_start`, where the part that was read begins. The result maps
    slot numbers (times divided by `precision_ms`) to positions.

    Raises _DisagreementError if a chain is broken, or if a slot is too far in the future.
    """
    import numpy as np  # noqa: PLC0415 - see above

    seconds = live.seconds
    # The wheel reaches half a turn into the future.
    if len(seconds) and int(seconds[-1]) >= first_second + SLOTS // 2:
        due_ms = int(seconds[-1]) * precision_ms
        raise _DisagreementError(f"a unit of the timer log is due at {due_ms} ms, beyond the wheel")

    # `live` is sorted by slot, so a unit is the first of its slot if its second differs from the
    # one before.
    is_first_of_slot = np.diff(seconds, prepend=-1) != 0
    expected_previous = np.where(is_first_of_slot, NO_UNIT, np.roll(live.positions, 1))
    begins_before = is_first_of_slot & (live.previous < log_start)
    is_chained = (live.previous == expected_previous) | begins_before
    if not is_chained.all():
        broken_ms = int(seconds[~is_chained][0]) * precision_ms
        raise _DisagreementError(
            f"the chain of the slot at {broken_ms} ms is broken in the timer log"
        )

    is_last_of_slot = np.diff(seconds, append=-1) != 0
    chain_ends = live.positions[is_last_of_slot].tolist()
    return dict(zip(seconds[is_last_of_slot].tolist(), chain_ends, strict=True))


class RecoveredUnits(NamedTuple):
    """The result of `recover_units`.

    `end` is the position in the timer log behind the last good unit. `queue_offset` is the offset
    of the next message of the timer queue. `record_position` is the commit log position of the
    message of the last good unit, NO_UNIT if no unit was good.
    """

    end: int
    queue_offset: int
    record_position: int


def recover_units(
    wheel: TimerWheel,
    log: TimerLog,
    queue_offset: int,
    record_at: Callable[[int, int], memoryview | bytes | None],
) -> RecoveredUnits:
    """Add the good units behind `log.end` to the slots of `wheel`, in memory.

    The last checkpoint counts the units (log entries) up to `log.end`; a crash may have left more.
    A unit is good if its message is in the commit log, and follows the message of the unit before
    in the timer queue. `record_at(position, size)` returns the record of a message, or None.
    `queue_offset` is the offset in the timer queue of the first message that is not in the files.
    The function stops at the first unit that is not good.

    Return the end of the good units, the next queue offset, and the position of the last record
    (NO_UNIT if no unit is good). `log.end` is not changed. Raises OSError.
    """
    end = log.end
    record_position = NO_UNIT
    for position, unit in log.iter_stored_units(log.end):
        record = record_at(unit.position, unit.size_bytes)
        if record is None or len(record) < _HEAD.size:
            break
        record_size, record_offset, record_start = _HEAD.unpack_from(record)
        is_its_record = record_size == unit.size_bytes and record_start == unit.position
        if not is_its_record or record_offset < queue_offset or unit.previous >= position:
            break
        _add_to_slot(wheel, position, unit)
        queue_offset = record_offset + 1
        record_position = record_start
        end = position + UNIT_BYTES
    return RecoveredUnits(end, queue_offset, record_position)


def _add_to_slot(wheel: TimerWheel, position: int, unit: TimerUnit) -> None:
    """Add a unit to its slot of the wheel, in memory, unless the slot has it already.

    `position` is the position of the unit in the timer log.
    """
    slot = wheel.get(unit.due_ms)
    count_change = -1 if unit.magic & MAGIC_DELETE else 1  # a recall cancels a message
    if slot is None:
        wheel.put(unit.due_ms, position, position, count_change)
    elif slot.last_unit < position:
        wheel.put(unit.due_ms, slot.first_unit, position, slot.message_count + count_change)


def _compare_with_wheel(
    wheel: TimerWheel,
    end_by_second: dict[int, int],
    log_start: int,
    first_second: int,
    precision_ms: int,
) -> None:
    """Raise _DisagreementError if the wheel and the timer log differ about the last unit of a slot.

    `end_by_second` has the positions of the last units according to the log, by slot number (time
    divided by `precision_ms`). Slots are compared from number `first_second` on, for half a turn of
    the wheel. A slot whose last unit is before `log_start` is not in the log's part, and is
    accepted.

    Slots that the wheel has are removed from `end_by_second`.
    """
    start_ms = first_second * precision_ms
    for time_ms in wheel.iter_occupied_ms(start_ms, start_ms + SLOTS // 2 * precision_ms):
        slot = wheel.get(time_ms)
        chain_end = end_by_second.pop(time_ms // precision_ms, NO_UNIT)
        if slot is None or slot.last_unit == chain_end:
            continue
        ends_before_part = chain_end == NO_UNIT and slot.last_unit < log_start
        if not ends_before_part:
            raise _DisagreementError(
                f"the wheel and the timer log differ about the slot at {time_ms} ms"
            )
    if end_by_second:  # chains whose slots are empty in the wheel
        first_ms = min(end_by_second) * precision_ms
        missing_slots = f"{len(end_by_second)} slots that the timer log has"
        raise _DisagreementError(f"the wheel lacks {missing_slots}, the first at {first_ms} ms")


def find_removed_units(log: TimerLog, log_start: int, from_ms: int) -> list[tuple[int, int]]:
    """Return (due time in ms, commit log position) of units whose messages no longer exist.

    Retention has removed the messages before `log_start`, the beginning of the commit log. Only
    units that are due at `from_ms` or later are returned. Recalls, which cancel messages, are left
    out. Raises OSError.
    """
    if not log_start or not log.end:
        return []
    import numpy as np  # noqa: PLC0415 - only when timer files are rebuilt

    removed_units: list[tuple[int, int]] = []
    for _, units in iter_unit_arrays(log, log.start, log.end):
        due_ms = units["write_ms"].astype(np.int64) + units["delay_ms"]
        is_removed = _are_valid(units) & (units["position"] < log_start) & (due_ms >= from_ms)
        is_removed &= (units["magic"] & MAGIC_DELETE) == 0
        removed_indices = np.flatnonzero(is_removed)
        removed_units += zip(
            due_ms[removed_indices].tolist(),
            units["position"][removed_indices].tolist(),
            strict=True,
        )
        # Units are in the order of the commit log: all later messages still exist.
        if len(units) and units["position"][-1] >= log_start:
            break
    return removed_units


def iter_unit_arrays(log: TimerLog, start: int, end: int) -> "Iterator[tuple[int, NDArray[Any]]]":
    """Yield (position, units) for the units of the timer log's files in [start, end).

    `units` is a structured NumPy array of consecutive units, the first of which is at `position`.
    The iteration stops at the first position at which no complete unit can be read. Raises OSError.
    """
    import numpy as np  # noqa: PLC0415 - see above

    for base in log.segment_starts:
        units_per_file = log.units_per_file
        unit_number = max(-(-(start - base) // UNIT_BYTES), 0)  # rounded up
        unit_number_end = min(units_per_file, (end - base) // UNIT_BYTES)
        while unit_number < unit_number_end:
            count = min(_UNITS_AT_ONCE, unit_number_end - unit_number)
            position = base + unit_number * UNIT_BYTES
            stored = log.read(position, count * UNIT_BYTES)
            whole_units_bytes = len(stored) // UNIT_BYTES * UNIT_BYTES
            units = np.frombuffer(stored[:whole_units_bytes], _UNIT_DTYPE)
            if not len(units):
                return
            yield position, units
            unit_number += len(units)


def _are_valid(units: "NDArray[Any]") -> "NDArray[np.bool_]":
    """Return an array of bools that says for each unit whether its fields have possible values."""
    magics = units["magic"]
    is_valid: NDArray[np.bool_] = (
        (units["unit_bytes"] == UNIT_BYTES)
        & (magics & MAGIC_DEFAULT != 0)
        & (magics & ~(MAGIC_DEFAULT | MAGIC_ROLL | MAGIC_DELETE) == 0)
        & (units["size"] > 0)
        & (units["previous"] >= NO_UNIT)
    )
    return is_valid
