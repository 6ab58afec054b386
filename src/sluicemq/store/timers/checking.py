"""Check whether the timer wheel and the timer log agree with each other.

After a crash, the checksums in the identity file say nothing. But wheel and log contain the same
facts twice: the units of a slot form a chain in which each unit refers to the one before, and the
slot in the wheel refers to both ends. Therefore a file that is zeroed, is older than the other one,
or has a flipped bit is found without reading a message.
"""

from collections.abc import Callable, Iterator
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
    """Compare wheel and log for the slots from `from_ms` on, and return what is wrong as a phrase.

    Return None if wheel and log agree, or if neither exists. Checked are, in this order: the fields
    of the units, the end of the log, the chain of each slot, and the ends of the chains in the
    wheel. Only the last READ_BYTES_MAX of the log are read. Raises OSError.
    """
    if log.end == log.start == 0 and not wheel.exists:
        return None
    import numpy as np  # noqa: PLC0415 - only after a crash, and only with timers

    first_second = from_ms // precision_ms
    end_second = from_ms // precision_ms + SLOTS // 2
    log_start = max(log.start, log.end - READ_BYTES_MAX)
    reached = log_start
    pieces: list[_LiveUnits] = []
    for position, units in iter_unit_arrays(log, log_start, log.end):
        bad = np.flatnonzero(~_are_valid(units))
        if len(bad):
            return f"the unit at {position + int(bad[0]) * UNIT_BYTES} of the timer log is damaged"
        seconds = (units["write_ms"].astype(np.int64) + units["delay_ms"]) // precision_ms
        live = np.flatnonzero(seconds >= first_second)
        previous = units["previous"][live].astype(np.int64)
        pieces.append(_LiveUnits(seconds[live], position + live * UNIT_BYTES, previous))
        reached = position + len(units) * UNIT_BYTES
    if reached < log.end:
        return f"the timer log has no unit at {reached}, and should end at {log.end}"
    seconds, positions, previous = (
        np.concatenate(column) if column else np.empty(0, np.int64)
        for column in ([piece[number] for piece in pieces] for number in range(3))
    )
    if len(seconds) and int(seconds.max()) >= end_second:
        due_ms = int(seconds.max()) * precision_ms
        return f"a unit of the timer log is due at {due_ms} ms, beyond the wheel"
    order = np.argsort(seconds, kind="stable")
    seconds = seconds[order]
    positions = positions[order]
    previous = previous[order]
    is_first = np.diff(seconds, prepend=-1) != 0
    wanted = np.where(is_first, NO_UNIT, np.roll(positions, 1))
    # The chain of a slot may begin before the part of the log that is read.
    is_chained = (previous == wanted) | (is_first & (previous < log_start))
    if not is_chained.all():
        second = int(seconds[int(np.flatnonzero(~is_chained)[0])])
        return f"the chain of the slot at {second * precision_ms} ms is broken in the timer log"
    chain_ends = positions[np.flatnonzero(np.diff(seconds, append=-1))]
    return _compare(
        wheel, seconds[is_first], chain_ends, log_start, first_second, precision_ms=precision_ms
    )


class _LiveUnits(NamedTuple):
    """The units of a part of the log that are not due before the compared slots.

    The arrays contain their slots divided by the precision, their positions, and the positions of
    the previous units.
    """

    seconds: "NDArray[np.int64]"
    positions: "NDArray[np.int64]"
    previous: "NDArray[np.int64]"


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

    `log.end` is the end according to the checkpoint; it does not change. Units that a slot has
    already are not added twice. `queue_offset` is the offset of the first message of the timer
    queue that is not in the files. A unit is good if `record_at(position, size)` returns its
    message from the commit log, with an offset behind that of the unit before. The function stops
    at the first unit that is not good. Raises OSError.
    """
    end = log.end
    record_position = NO_UNIT
    for position, unit in log.iter_stored_units(log.end):
        view = record_at(unit.position, unit.size_bytes)
        if view is None or len(view) < _HEAD.size:
            break
        size, offset, record_start = _HEAD.unpack_from(view)
        is_its_record = size == unit.size_bytes and record_start == unit.position
        if not is_its_record or offset < queue_offset or unit.previous >= position:
            break
        slot = wheel.get(unit.due_ms)
        step = -1 if unit.magic & MAGIC_DELETE else 1
        if slot is None:
            wheel.put(unit.due_ms, position, position, step)
        elif slot.last_unit < position:
            wheel.put(unit.due_ms, slot.first_unit, position, slot.message_count + step)
        queue_offset = offset + 1
        record_position = record_start
        end = position + UNIT_BYTES
    return RecoveredUnits(end, queue_offset, record_position)


def _compare(
    wheel: TimerWheel,
    seconds: "NDArray[np.int64]",
    chain_ends: "NDArray[np.int64]",
    log_start: int,
    first_second: int,
    *,
    precision_ms: int,
) -> str | None:
    """Compare the slots of the wheel with the ends of the chains in the log.

    `seconds` are the slots of the chains, divided by the precision, and `chain_ends` the positions
    of their last units. The log was read from `log_start` on, so a chain that ends before is not
    among them. The wheel is compared from slot `first_second` on, for half a turn. Return the first
    difference as a phrase, None if there is none.
    """
    end_by_second = dict(zip(seconds.tolist(), chain_ends.tolist(), strict=True))
    start_ms = first_second * precision_ms
    for time_ms in wheel.iter_occupied_ms(start_ms, start_ms + SLOTS // 2 * precision_ms):
        slot = wheel.get(time_ms)
        last = end_by_second.pop(time_ms // precision_ms, NO_UNIT)
        if (
            slot is not None
            and slot.last_unit != last
            and (last != NO_UNIT or slot.last_unit >= log_start)
        ):
            return f"the wheel and the timer log differ about the slot at {time_ms} ms"
    if end_by_second:  # chains whose slots are empty in the wheel
        first_ms = min(end_by_second) * precision_ms
        what = f"{len(end_by_second)} slots that the timer log has"
        return f"the wheel lacks {what}, the first at {first_ms} ms"
    return None


def find_removed_units(log: TimerLog, log_start: int, from_ms: int) -> list[tuple[int, int]]:
    """Return (due time in ms, commit log position) of units whose messages retention has removed.

    These are the units that are due from `from_ms` on and whose messages are before `log_start`,
    the beginning of the commit log. Recalls (MAGIC_DELETE) are left out. Raises OSError.
    """
    if not log_start or not log.end:
        return []
    import numpy as np  # noqa: PLC0415 - only when timer files are rebuilt

    found: list[tuple[int, int]] = []
    for _, units in iter_unit_arrays(log, log.start, log.end):
        due_ms = units["write_ms"].astype(np.int64) + units["delay_ms"]
        is_removed = _are_valid(units) & (units["position"] < log_start) & (due_ms >= from_ms)
        is_removed &= (units["magic"] & MAGIC_DELETE) == 0
        removed = np.flatnonzero(is_removed)
        found += zip(due_ms[removed].tolist(), units["position"][removed].tolist(), strict=True)
        if len(units) and units["position"][-1] >= log_start:
            break
    return found


def iter_unit_arrays(log: TimerLog, start: int, end: int) -> "Iterator[tuple[int, NDArray[Any]]]":
    """Yield (position, units) for the units of the timer log's files in [start, end).

    `units` is a structured NumPy array. The iteration stops at the first position where no complete
    unit can be read. Raises OSError.
    """
    import numpy as np  # noqa: PLC0415 - see above

    for base in log.segment_starts:
        full = log.units_per_file
        number = max(-(-(start - base) // UNIT_BYTES), 0)
        stop = min(full, (end - base) // UNIT_BYTES)
        while number < stop:
            count = min(_UNITS_AT_ONCE, stop - number)
            position = base + number * UNIT_BYTES
            data = log.read(position, count * UNIT_BYTES)
            units = np.frombuffer(data[: len(data) // UNIT_BYTES * UNIT_BYTES], _UNIT_DTYPE)
            if not len(units):
                return
            yield position, units
            number += len(units)


def _are_valid(units: "NDArray[Any]") -> "NDArray[np.bool_]":
    """Return for each unit whether its fields have values that a unit can have."""
    magic = units["magic"]
    is_valid: NDArray[np.bool_] = (
        (units["unit_bytes"] == UNIT_BYTES)
        & (magic & MAGIC_DEFAULT != 0)
        & (magic & ~(MAGIC_DEFAULT | MAGIC_ROLL | MAGIC_DELETE) == 0)
        & (units["size"] > 0)
        & (units["previous"] >= NO_UNIT)
    )
    return is_valid
