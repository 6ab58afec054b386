"""Check whether the timer wheel and the timer log agree with each other.

After a crash the checksums say nothing. But wheel and log hold the same facts twice: the units of a
slot form a chain in which each unit points to the one before, and the slot in the wheel points to
both ends. So a file that is zeroed, is older than the other, or has a flipped bit is found without
reading a message.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sluicemq.record.layout import RECORD_HEAD
from sluicemq.store.timers.files import (
    DEFAULT,
    DELETE,
    NONE,
    ROLL,
    SLOTS,
    UNIT_BYTES,
    TimerLog,
    TimerWheel,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

READ_BYTES_MAX: Final = 1 << 30
"""The most bytes at the end of a timer log that `disagreement` reads. A unit before them is checked
when its slot is loaded."""
_UNITS_AT_ONCE: Final = 1 << 15
_BEGIN: Final = RECORD_HEAD.only("size", "queue_offset", "physical_offset")
_DTYPE: Final = [
    ("unit_bytes", ">i4"), ("previous", ">i8"), ("magic", ">i4"), ("write_ms", ">i8"),
    ("delay_ms", ">i4"), ("position", ">i8"), ("size", ">i4"), ("hash", ">i4"), ("zero", ">i8"),
]  # fmt: skip


def disagreement(wheel: TimerWheel, log: TimerLog, from_ms: int, precision_ms: int) -> str | None:
    """Compare wheel and log for the slots from `from_ms` on, as far as the last READ_BYTES_MAX of
    the log tell. Return what is wrong as a phrase; None if they agree, or if neither exists. Raises
    OSError."""
    if log.end == log.start == 0 and not wheel.exists:
        return None
    import numpy as np  # noqa: PLC0415 - only after a crash, and only with timers

    first, end = from_ms // precision_ms, from_ms // precision_ms + SLOTS // 2
    begin = max(log.start, log.end - READ_BYTES_MAX)
    reached, found = begin, []
    for at, units in unit_arrays(log, begin, log.end):
        bad = np.flatnonzero(~_are_whole(units))
        if len(bad):
            return f"the unit at {at + int(bad[0]) * UNIT_BYTES} of the timer log is damaged"
        seconds = (units["write_ms"].astype(np.int64) + units["delay_ms"]) // precision_ms
        live = np.flatnonzero(seconds >= first)
        places = at + live * UNIT_BYTES
        found.append((seconds[live], places, units["previous"][live].astype(np.int64)))
        reached = at + len(units) * UNIT_BYTES
    if reached < log.end:
        return f"the timer log has no unit at {reached}, and should end at {log.end}"
    columns = [np.concatenate([piece[i] for piece in found]) if found else np.empty(0, np.int64)
               for i in range(3)]  # fmt: skip
    seconds, places, previous = columns
    if len(seconds) and int(seconds.max()) >= end:
        due_ms = int(seconds.max()) * precision_ms
        return f"a unit of the timer log is due at {due_ms} ms, beyond the wheel"
    order = np.argsort(seconds, kind="stable")
    seconds, places, previous = seconds[order], places[order], previous[order]
    is_first = np.diff(seconds, prepend=-1) != 0
    wanted = np.where(is_first, NONE, np.roll(places, 1))
    is_chained = (previous == wanted) | (is_first & (previous < begin))
    if not is_chained.all():
        second = int(seconds[int(np.flatnonzero(~is_chained)[0])])
        return f"the chain of the slot at {second * precision_ms} ms is broken in the timer log"
    lasts = places[np.flatnonzero(np.diff(seconds, append=-1))]
    return _compare(wheel, seconds[is_first], lasts, begin, first, precision_ms)


class Revised(NamedTuple):
    """The result of `revise`: the position behind the last good unit of the timer log, the offset
    of the timer queue's message that comes next, and the commit log position of the last good
    unit's message (NONE: no unit was good)."""

    end: int
    queue_offset: int
    record_position: int


def revise(
    wheel: TimerWheel,
    log: TimerLog,
    queue_offset: int,
    record_at: Callable[[int, int], memoryview | bytes | None],
) -> Revised:
    """Add the good units that lie behind `log.end` to the slots of `wheel`, in memory. Return how
    far they reach.

    `log.end` is the end according to the checkpoint. `queue_offset` is the offset of the first
    message of the timer queue that is not in the files. A unit is good if `record_at(position,
    size)` returns its message from the commit log, with an offset behind that of the unit before.
    Stop at the first unit that is not good. Raises OSError.
    """
    end, record_position = log.end, NONE
    for position, unit in log.walk(log.end):
        view = record_at(unit.position, unit.size_bytes)
        if view is None or len(view) < _BEGIN.size:
            break
        size, offset, place = _BEGIN.unpack_from(view)
        is_there = size == unit.size_bytes and place == unit.position
        if not is_there or offset < queue_offset or unit.previous >= position:
            break
        slot = wheel.get(unit.due_ms)
        step = -1 if unit.magic & DELETE else 1
        if slot is None:
            wheel.put(unit.due_ms, position, position, step)
        elif slot.last < position:
            wheel.put(unit.due_ms, slot.first, position, slot.messages + step)
        queue_offset, record_position = offset + 1, place
        end = position + UNIT_BYTES
    return Revised(end, queue_offset, record_position)


def _compare(
    wheel: TimerWheel,
    seconds: "NDArray[np.int64]",
    lasts: "NDArray[np.int64]",
    begin: int,
    first: int,
    precision_ms: int,
) -> str | None:
    """Compare the wheel's slots from slot `first` on with `lasts`, the ends of the chains that the
    log holds from `begin` on. Return the difference as a phrase, or None."""
    known = dict(zip(seconds.tolist(), lasts.tolist(), strict=True))
    start_ms = first * precision_ms
    for time_ms in wheel.occupied(start_ms, start_ms + SLOTS // 2 * precision_ms):
        slot = wheel.get(time_ms)
        last = known.pop(time_ms // precision_ms, NONE)
        if slot is not None and slot.last != last and (last != NONE or slot.last >= begin):
            return f"the wheel and the timer log differ about the slot at {time_ms} ms"
    if known:
        first_ms = min(known) * precision_ms
        what = f"{len(known)} slots that the timer log has"
        return f"the wheel lacks {what}, the first at {first_ms} ms"
    return None


def gone_units(log: TimerLog, log_start: int, from_ms: int) -> list[tuple[int, int]]:
    """Return (due in ms, position in the commit log) of the units that are due from `from_ms` on
    and whose messages lie before `log_start`, the beginning of the commit log: retention has
    removed them. Leave out recalls (DELETE). Raises OSError."""
    if not log_start or not log.end:
        return []
    import numpy as np  # noqa: PLC0415 - only when timer files are built again

    found: list[tuple[int, int]] = []
    for _, units in unit_arrays(log, log.start, log.end):
        due_ms = units["write_ms"].astype(np.int64) + units["delay_ms"]
        is_gone = _are_whole(units) & (units["position"] < log_start) & (due_ms >= from_ms)
        is_gone &= (units["magic"] & DELETE) == 0
        at = np.flatnonzero(is_gone)
        found += zip(due_ms[at].tolist(), units["position"][at].tolist(), strict=True)
        if len(units) and units["position"][-1] >= log_start:
            break
    return found


def unit_arrays(log: TimerLog, start: int, end: int) -> "Iterator[tuple[int, NDArray[Any]]]":
    """Yield (position, units) of the timer log's files within [start, end); `units` is a structured
    NumPy array. Stop at the first position where no whole unit can be read. Raises OSError."""
    import numpy as np  # noqa: PLC0415 - see above

    for base in log.bases:
        full = log.units_a_file
        number = max(-(-(start - base) // UNIT_BYTES), 0)
        stop = min(full, (end - base) // UNIT_BYTES)
        while number < stop:
            count = min(_UNITS_AT_ONCE, stop - number)
            at = base + number * UNIT_BYTES
            data = log.read(at, count * UNIT_BYTES)
            units = np.frombuffer(data[: len(data) // UNIT_BYTES * UNIT_BYTES], _DTYPE)
            if not len(units):
                return
            yield at, units
            number += len(units)


def _are_whole(units: "NDArray[Any]") -> "NDArray[np.bool_]":
    magic = units["magic"]
    is_whole: NDArray[np.bool_] = (
        (units["unit_bytes"] == UNIT_BYTES)
        & (magic & DEFAULT != 0)
        & (magic & ~(DEFAULT | ROLL | DELETE) == 0)
        & (units["size"] > 0)
        & (units["previous"] >= NONE)
    )
    return is_whole
