"""Checking: do the timer wheel and the timer log agree with each other?

After a crash no checksum holds. But wheel and log say the same twice: the units of one second are a
chain, each points to the one before, and the wheel's slot knows both ends. So a file that is
zeroed, older than the other, or has a flipped bit is found without reading a single message.
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
"""So much of the end of a timer log is read; a unit before that is checked when its second is
loaded."""
_UNITS_AT_ONCE: Final = 1 << 15
_BEGIN: Final = RECORD_HEAD.only("size", "queue_offset", "physical_offset")
_DTYPE: Final = [
    ("unit_bytes", ">i4"), ("previous", ">i8"), ("magic", ">i4"), ("write_ms", ">i8"),
    ("delay_ms", ">i4"), ("position", ">i8"), ("size", ">i4"), ("hash", ">i4"), ("zero", ">i8"),
]  # fmt: skip


def disagreement(wheel: TimerWheel, log: TimerLog, from_ms: int, precision_ms: int) -> str | None:
    """Return what is wrong with the seconds from `from_ms` on, as a phrase; None when wheel and log
    agree. Raises OSError."""
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
        return f"a unit of the timer log is due at {int(seconds.max())}, beyond the wheel"
    order = np.argsort(seconds, kind="stable")
    seconds, places, previous = seconds[order], places[order], previous[order]
    is_first = np.diff(seconds, prepend=-1) != 0
    wanted = np.where(is_first, NONE, np.roll(places, 1))
    is_chained = (previous == wanted) | (is_first & (previous < begin))
    if not is_chained.all():
        second = int(seconds[int(np.flatnonzero(~is_chained)[0])])
        return f"the chain of the second {second} is broken in the timer log"
    lasts = places[np.flatnonzero(np.diff(seconds, append=-1))]
    return _compare(wheel, seconds[is_first], lasts, begin, first, precision_ms)


class Revised(NamedTuple):
    """How far the timer log is good, and the message of the queue that comes next."""

    end: int
    queue_offset: int
    record_position: int


def revise(
    wheel: TimerWheel,
    log: TimerLog,
    queue_offset: int,
    record_at: Callable[[int, int], memoryview | bytes | None],
) -> Revised:
    """Put the units that the log holds behind its end into the wheel's slots, in memory.

    A unit is good when its message stands in the commit log (`record_at(position, size)`), behind
    the one before: what a crash left of other units ends the walk. Raises OSError.
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
    """Compare the wheel's slots with the ends of the chains that the log holds from `begin` on."""
    known = dict(zip(seconds.tolist(), lasts.tolist(), strict=True))
    start_ms = first * precision_ms
    for time_ms in wheel.occupied(start_ms, start_ms + SLOTS // 2 * precision_ms):
        slot = wheel.get(time_ms)
        last = known.pop(time_ms // precision_ms, NONE)
        if slot is not None and slot.last != last and (last != NONE or slot.last >= begin):
            return f"the wheel and the timer log differ about the second {time_ms // precision_ms}"
    if known:
        return f"the wheel lacks {len(known)} seconds that the timer log has, as {min(known)}"
    return None


def gone_units(log: TimerLog, log_start: int, from_ms: int) -> list[tuple[int, int]]:
    """Return (due in ms, position in the commit log) of the units that are due from `from_ms` on,
    and whose messages lie before `log_start`, where the commit log begins: retention has removed
    them. Raises OSError."""
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
    """Yield (position, units as an array) of the timer log's files within [start, end)."""
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
