"""Collecting the records of a read within its limits, as slices of the log, none of them damaged.

No message is copied or decoded: units come in, adjacent records are one slice. With a filter of an
ordinary pull it is also no more than the reader can hold (`Reach`), reckoned from the first match
it has not consumed: a pull names the offset up to which everything is consumed.

Seven hundred conditions on two thousand messages take a quarter of a second: no reader may hold the
loop so long. A read that has to know verdicts which take long ends with a `Judgement` instead: the
caller runs it in any thread, keeps what it found, and reads again, which finds it. A read that has
come to something before it needs one ends there, as one whose time is up.

Readers do not see damage (`Soundness`): it is mended from the log, passed over, or refused, and
always logged. An ordinary start does not read the whole store, so a disk may have spoilt what lies
far back. What this process has written itself is trusted; a record from before is looked at when it
is read:

    an ordinary pull     wholly, CRC included, and whether it is the queue's: it carries 32 messages
    a bulk read          size, magic number, position, queue id and offset, in columns when many

What does not agree is one of three things:

    the unit is wrong    the log has the message, between the records of its neighbours in the
                         queue: the unit is written anew
    the queue is wrong   its units lead to records of other queues, and so do the neighbours': it is
                         read no more, and the next start builds the queues anew (`is_doubtful`)
    the record is bad    the unit becomes a blank one: the reader goes on behind it, instead of
                         being handed nonsense or staying in front of it for ever

Each is logged once, with the cure. Place holders of a repair (`log.LOST_CODE`) are passed over in
silence. Not seen here is a changed tag code in a unit whose message a tag filter leaves out: only
`sluice store verify` compares those.
"""

import contextlib
import logging
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, takewhile
from typing import Any, Final, NamedTuple
from zlib import crc32

from sluicemq import engine
from sluicemq.errors import StoreDamagedError
from sluicemq.model.subscription import MessageFilter
from sluicemq.record.layout import (
    CRC_MASK,
    HOST_BITS,
    MAGIC_V1,
    MAGICS,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
)
from sluicemq.store.log import LOST_CODE, CommitLog, records_from
from sluicemq.store.queues import (
    BLANK_SIZE,
    BLANK_UNIT,
    GAP_MAX,
    UNIT,
    UNIT_BYTES,
    ConsumeQueues,
    Queue,
    Unit,
    Units,
)
from sluicemq.store.segments import Segment

PULL_SPAN_MAX: Final = 2000
"""How far apart the matches may lie that a client of ordinary pulls has and has not consumed, as
long as nothing else is known of it (`broker.consume.delivery`).

The Java push consumer holds back for 50 ms when they span more (its consumeConcurrentlyMaxSpan):
an answer of 32 matches of a rare tag would cost more than it brings."""
NO_LIMIT: Final = 1 << 62
WEIGHT_INLINE: Final = 512
"""Of filters that are asked at once, record by record: some 20 µs each."""
RECORDS_S: Final = 0.002
"""After so long a read that looks at records ends."""
FILTERS_KEPT: Final = 64
RECORDS_KEPT: Final = 1024
"""Of each of them; it is asked about 256 at once."""
_READ_UNITS_MAX: Final = 4096
_RUNS_BYTES_MIN: Final = 512 * UNIT_BYTES
"""Fewer units are faster one by one, and ordinary pulls never have so many."""
Select = Callable[[Units], Iterable[int]]
"""Which of some units are wanted: their indices, ascending."""
REPORTS_MAX: Final = 1000
"""So many places are logged; the rest is only counted."""
COLUMNS_MIN: Final = 256
MEND_BYTES_MAX: Final = 16 << 20
"""So much of the log is searched for the message of a wrong unit."""
_HEAD: Final = RECORD_HEAD.only("size", "magic", "queue_id", "queue_offset", "physical_offset")
_unpack_whole: Final = RECORD_HEAD.only(
    "size", "magic", "body_crc", "queue_id", "queue_offset", "physical_offset", "sys_flag",
    "store_time", "body_length",
).unpack_from  # fmt: skip
_NOTHING: Final = memoryview(b"")
_unpack_units: Final = UNIT.iter_unpack
_first_position: Final = struct.Struct(">q").unpack_from


def are_whole(
    units: Units, offsets: Sequence[int], segment: Segment, queue: Queue, lost_code: int
) -> bool:
    """Are the records of the units, which stand at these offsets of the queue, all common ones,
    whole, and in one file of the log? False where each has to be looked at. HOT; as the compiled
    engine has it."""
    base, topic, queue_id = segment.base, queue.topic_part, queue.queue_id
    view = segment.data_view(end_of_last(units))
    room = base + len(view) - RECORD_BYTES_MIN
    for (position, size, code), offset in zip(_unpack_units(units), offsets, strict=True):
        if code == lost_code or not base <= position <= room or size < RECORD_BYTES_MIN:
            return False
        at = position - base
        length, magic, crc, number, at_offset, place, flags, time_ms, body_length = _unpack_whole(
            view, at
        )
        begin = at + RECORD_HEAD.size
        end = begin + body_length
        behind = bytes(view[end : at + size])
        properties = len(topic) + 2
        if (
            (length, magic, number, at_offset) != (size, MAGIC_V1, queue_id, offset)
            or place != position
            or flags & HOST_BITS
            or not time_ms
            or not 0 <= body_length <= size - RECORD_BYTES_MIN
            or crc32(view[begin:end]) & CRC_MASK != crc
            or at + size > len(view)
            or not behind.startswith(topic)
            or int.from_bytes(behind[properties - 2 : properties], "big")
            != len(behind) - properties
            or b"\0" in behind[properties:]
        ):
            return False
    return True


def end_of_last(units: Units) -> int:
    """Return where the record of the last unit ends in the log, as the unit says."""
    position, size, _ = UNIT.unpack_from(units, len(units) - UNIT_BYTES)
    return int(position) + int(size)


@cache
def _several(count: int) -> Callable[[Units], tuple[int, ...]]:
    """Reads positions and sizes of so many units in turn."""
    return struct.Struct(">" + count * "qi8x").unpack


class Soundness:
    """Looks at records written before `trusted_from`; knows what it has found."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues, delays_ms: Sequence[int]) -> None:
        """`delays_ms` are the delays of level 1, 2, … (messageDelayLevel)."""
        self._log = log
        self._queues = queues
        self._delays_ms = delays_ms
        self._found: set[int] = set()
        self.trusted_from = log.written_offset
        """Records from here on are this process's own."""

    @property
    def damaged(self) -> int:
        """How many damaged records readers have come upon."""
        return len(self._found)

    def is_trusted(self, position: int) -> bool:
        """Whether what lies there was written by this process."""
        return self.trusted_from <= position < self._log.written_offset

    def is_sound(self, position: int, size: int, *, is_whole: bool) -> bool:
        """Whether the record may be given to a reader. Damage is logged and counted."""
        reason = self._fault(Unit(position, size, 0), None, is_whole=is_whole)
        if reason:
            self._note(position, reason)
        return reason is None

    def blank_bad(
        self, units: Units, queue: Queue, offsets: Sequence[int], *, is_whole: bool
    ) -> Units:
        """The units, mended where they are wrong, blank where they have no sound record.

        `offsets` are the queue offsets of the units. `is_whole` looks at whole records, else at
        their heads. Units whose records retention has removed stay: the caller knows what to do.
        Raises StoreDamagedError when the whole queue is wrong.
        """
        segment = self._log.segments.at(UNIT.unpack_from(units)[0])
        if is_whole and segment is not None and not self._log.requires_checksum:
            look = are_whole if engine.pulls is None else engine.pulls.are_whole
            if look(units, offsets, segment, queue, LOST_CODE):
                return units
        suspects: Sequence[int] = range(len(units) // UNIT_BYTES)
        if not is_whole and segment is not None and len(suspects) >= COLUMNS_MIN:
            from sluicemq.store.bulk import unproved_heads  # noqa: PLC0415 - NumPy: bulk reads

            view = segment.data_view(end_of_last(units))
            suspects = unproved_heads(view, segment.base, units, queue.queue_id, offsets)
        blanked: bytearray | None = None
        for index in suspects:
            unit = Unit._make(UNIT.unpack_from(units, index * UNIT_BYTES))
            position, size, code = unit
            if self.is_trusted(position) and code != LOST_CODE and size > 0:
                continue
            reason = self._fault(unit, (queue, offsets[index]), is_whole=is_whole)
            if reason is None:
                continue
            mended = self._mended(unit, queue, offsets[index]) if reason else None
            if reason and mended is None:
                self._note(position, reason)
            blanked = bytearray(units) if blanked is None else blanked
            blanked[index * UNIT_BYTES : (index + 1) * UNIT_BYTES] = mended or BLANK_UNIT
        return units if blanked is None else blanked

    def _fault(self, unit: Unit, place: tuple[Queue, int] | None, *, is_whole: bool) -> str | None:
        """Why the record may not be given to a reader (of a queue, at an offset of it); None when
        it may, "" when there never was one."""
        position, size, code = unit
        if code == LOST_CODE or size == BLANK_SIZE:
            return ""
        if 0 <= position < self._log.start:
            return None  # its file was deleted: that is no damage
        segment = self._log.segments.at(position)
        if segment is None:
            return f"no file of the log holds byte {position}"
        if size < RECORD_BYTES_MIN or position + size > segment.end:
            return f"a record of {size} bytes cannot be there"
        if not is_whole:
            view, at = segment.look(position, RECORD_BYTES_MIN)
            found, magic, queue_id, offset, where = _HEAD.unpack_from(view, at)
            is_record = found == size and magic in MAGICS and where == position
            is_its = place is None or (queue_id, offset) == (place[0].queue_id, place[1])
            if is_record and is_its:
                return None
        record = self._log.counted_at(position)
        if record is None or record.size_bytes != size:
            return f"{self._log.explain(position)} ({segment.path})"
        if place is not None and not record.stands_in(place[0].key, place[1]):
            return "it says that it stands elsewhere than its queue says"
        return None

    def _mended(self, unit: Unit, queue: Queue, offset: int) -> bytes | None:
        """The unit as the log says it, written to the queue; None when it is the log that is bad.

        Raises StoreDamagedError when the units around are wrong too.
        """
        before, behind = self._neighbour(queue, offset, -1), self._neighbour(queue, offset, 1)
        start = self._log.start if before is None else before.end
        end = self._log.written_offset if behind is None else behind.physical_offset
        if end - start <= MEND_BYTES_MAX:
            for record in takewhile(lambda r: r.position < end, records_from(self._log, start)):
                if record.is_queued and record.stands_in(queue.key, offset):
                    code = record.tag_code(self._delays_ms)
                    data = UNIT.pack(record.position, record.size_bytes, code)
                    logger.warning(
                        "queue %s/%d: the unit of message %d was damaged, and is what the log says"
                        " again", queue.topic, queue.queue_id, offset,
                    )  # fmt: skip
                    with contextlib.suppress(OSError):  # the reader has it, and finds it next time
                        queue.mend(offset, data)
                    return data
        if before is None and behind is None and self._log.counted_at(unit.physical_offset):
            self._queues.is_doubtful = True
            raise StoreDamagedError(
                f"The queue {queue.topic}/{queue.queue_id} in {queue.segments.directory} is damaged"
                f" at {offset}: its units lead to records of other queues.",
                fix="Stop the broker and start it again: it builds the queues anew from the log.",
            )
        return None

    def _neighbour(self, queue: Queue, offset: int, step: int) -> Unit | None:
        """The nearest unit, in one direction, that leads to its record."""
        for at in range(offset + step, offset + step * GAP_MAX, step):
            unit = queue.unit(at) if queue.offset_min <= at < queue.visible_offset else None
            if unit is None:
                return None
            if unit.is_used and self._fault(unit, (queue, at), is_whole=False) is None:
                return unit
        return None

    def _note(self, position: int, reason: str) -> None:
        if position not in self._found and len(self._found) < REPORTS_MAX:
            logger.error(
                "the record at %d of the log is damaged and is passed over: %s;"
                " stop the broker and run `sluice store repair`", position, reason,
            )  # fmt: skip
        self._found.add(position)


class Judgement(NamedTuple):
    """What a read has to know: `keep(run())`, of which `run` may happen in any thread."""

    run: Callable[[], Any]
    keep: Callable[[Any], object]


class PostponedError(Exception):
    """A read cannot go on without a judgement."""

    def __init__(self, judgement: Judgement) -> None:
        super().__init__("verdicts have to be found first")
        self.judgement = judgement


class JudgedRecords:
    """Verdicts of filters on records, by their places in the log."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[MessageFilter, dict[int, bool]]] = OrderedDict()

    def select(
        self,
        message_filter: MessageFilter,
        units: Units,
        properties_at: Callable[[int, int], Mapping[str, str]],
    ) -> Sequence[int]:
        """Which of some units a filter wants: their indices. `properties_at` reads those of a
        record by its position and size.

        Raises PostponedError.
        """
        _, known = self._known.get(id(message_filter), (None, {}))
        places = [
            (index, position, size)
            for index, (position, size, code) in enumerate(_unpack_units(units))
            if size != BLANK_SIZE and message_filter.by_consume_queue(code)
        ]
        read = [
            (position, properties_at(position, size))
            for _, position, size in places
            if position not in known
        ]
        if not read:
            return [index for index, position, _ in places if known[position]]

        def run() -> dict[int, bool]:
            matches = message_filter.by_commit_log
            return {position: matches(properties) for position, properties in read}

        def keep(found: dict[int, bool]) -> None:
            _, known = self._known.pop(id(message_filter), (None, {}))
            if len(known) > RECORDS_KEPT - len(found):
                known = {}
            known.update(found)
            # What is kept cannot have given its id to another.
            self._known[id(message_filter)] = (message_filter, known)
            if len(self._known) > FILTERS_KEPT:
                self._known.popitem(last=False)

        raise PostponedError(Judgement(run, keep))


class Reach(NamedTuple):
    """What a reader of ordinary pulls can hold.

    It has consumed everything below `consumed`; the matches that it has and has not consumed may
    lie `span_max` apart. When none of those that come is within that, a reader that `is_patient`
    gets nothing, and another one gets as many as if it held nothing.
    """

    consumed: int
    span_max: int = PULL_SPAN_MAX
    is_patient: bool = False


@dataclass(slots=True, eq=False)
class Gather:
    """Collects records within limits, as slices of the log.

    `reach` None: the reader may hold any number. `held_from` is the first match that it holds (-1:
    none that we know of), `last` the last one that it is given. `judgement`: the read cannot go on
    without. `is_out_of_reach`: there is a match, and the reader has to ask for it once more.
    `is_sure`: no evaluation of the filter has failed.
    """

    log: CommitLog
    sound: Soundness
    queue: Queue
    count_max: int
    bytes_max: int
    is_bulk: bool
    reach: Reach | None = None
    may_postpone: bool = False
    data: list[memoryview] = field(default_factory=list)
    count: int = 0
    size_bytes: int = 0
    is_missing: bool = False
    is_out_of_reach: bool = False
    is_sure: bool = False
    held_from: int = -1
    last: int = -1
    judgement: Judgement | None = None
    _run_start: int = -1  # of adjacent records, not yet sliced
    _run_end: int = -1
    _view: memoryview = _NOTHING  # the log file of the run, which holds [_base, _limit)
    _base: int = 0
    _limit: int = 0

    @property
    def room(self) -> int:
        """How many more messages may come."""
        return 0 if self.is_missing else self.count_max - self.count

    def take_from(self, offset: int) -> int:
        """Take all from a queue offset on that have room; returns the next offset. HOT."""
        queue, high = self.queue, self.queue.visible_offset
        while offset < high and not self.is_missing and self.count < self.count_max:
            wanted = min(high - offset, self.count_max - self.count, _READ_UNITS_MAX)
            units = queue.units(offset, wanted)
            if not len(units):
                self.is_missing = True
                break
            done = self.take_all(units, range(offset, offset + len(units) // UNIT_BYTES))
            offset += done
            if done * UNIT_BYTES < len(units):
                break
        return offset

    def take_all(self, units: Units, offsets: Sequence[int]) -> int:
        """Take the units in order; returns how many were dealt with. HOT.

        `offsets` are their queue offsets.
        """
        if len(units) and not self.sound.is_trusted(_first_position(units)[0]):
            is_whole = not self.is_bulk
            units = self.sound.blank_bad(units, self.queue, offsets, is_whole=is_whole)
        if len(units) >= _RUNS_BYTES_MIN:
            done = self._take_runs(units)
        else:
            done = self._take_plain(units) if self._run_start < 0 else 0
        return done or self._take_singly(units)

    def _take_plain(self, units: Units) -> int:
        """All of a few units, when nothing stands in the way: they have room, one file of the log
        holds them, none is blank. 0 when something does, and nothing has changed then. HOT."""
        count, room = len(units) // UNIT_BYTES, self.bytes_max - self.size_bytes
        if not 0 < count <= self.room:
            return 0
        first = _first_position(units)[0]
        if not self._base <= first < self._limit:
            segment = self.log.segments.at(first)
            if segment is None:
                return 0
            self._view, self._base, self._limit = segment.view(), segment.base, segment.end
        view, base = self._view, self._base
        numbers = _several(count)(units)
        starts, sizes = numbers[::2], numbers[1::2]
        size, end = sum(sizes), starts[-1] + sizes[-1]
        if max(sizes) == BLANK_SIZE or size > room or end > self._limit:
            return 0
        if end - first == size:
            self.data.append(view[first - base : end - base])
        else:
            self.data += [
                view[start - base : start - base + size]
                for start, size in zip(starts, sizes, strict=True)
            ]
        self.count += count
        self.size_bytes += size
        return count

    def _take_singly(self, units: Units) -> int:
        """One by one, as far as they have room; returns how many were dealt with."""
        room = 0 if self.is_missing else self.count_max - self.count
        total, start, end = self.size_bytes, self._run_start, self._run_end
        bytes_max = self.bytes_max if self.count else NO_LIMIT  # the first one always passes
        done = taken = 0
        for position, size, _ in _unpack_units(units):
            if size == BLANK_SIZE:
                done += 1
                continue
            if taken >= room or total + size > bytes_max:
                break
            if position != end:
                if start >= 0:
                    self.data.append(self._view[start - self._base : end - self._base])
                start = position
                if not self._base <= position <= self._limit - size and not self._turn_to(
                    position, size
                ):
                    start = -1
                    break
            end = position + size
            total += size
            taken += 1
            done += 1
            bytes_max = self.bytes_max
        self._run_start, self._run_end = start, end
        self.count += taken
        self.size_bytes = total
        return done

    def _take_runs(self, units: Units) -> int:
        """As many of the units as have room, run by run; 0 when they have to be looked at singly,
        and nothing has changed then."""
        from sluicemq.store.bulk import runs_of  # noqa: PLC0415 - NumPy for large reads only

        found = runs_of(units, self.room, self.bytes_max - self.size_bytes)
        if found is None:
            return 0
        for start, end in found.places:
            segment = self.log.segments.at(start)
            if segment is None or end > segment.end:  # one file of the log has to hold all of a run
                return 0
        for start, end in found.places:
            if start != self._run_end:
                self.close()
                self._turn_to(start, end - start)
                self._run_start = start
            self._run_end = end
        self.count += found.messages
        self.size_bytes += found.size_bytes
        return found.messages

    def take_some(self, units: Units, position: int, indices: Iterable[int]) -> int:
        """Take the units at `indices`; returns the queue offset of the first one that found no
        room, or -1. `position` is that of the first unit.

        The chosen ones are put side by side first: one pass of `take_all` instead of one for each.
        """
        chosen = list(islice(indices, self.room + 1))
        begins = [index * UNIT_BYTES for index in chosen]
        side_by_side = b"".join([units[begin : begin + UNIT_BYTES] for begin in begins])
        return self.take_chosen(side_by_side, [position + index for index in chosen])

    def take_chosen(self, units: Units, offsets: Sequence[int]) -> int:
        """Take units that lie side by side; returns the first of their queue `offsets` that found
        no room, or -1. HOT."""
        room = self.room
        wanted = min(len(offsets), room)
        reach = self.reach
        if reach is not None and wanted:  # only what the reader can hold beside what it has
            first, held_from = offsets[0], self.held_from
            # Out of reach: it holds nothing, or does not count as Java does, unless it is patient.
            is_beyond = held_from >= 0 and first - held_from > reach.span_max and not self.count
            self.is_out_of_reach = is_beyond and reach.is_patient
            if held_from < 0 or (is_beyond and not reach.is_patient):
                self.held_from = held_from = first
            if self.is_out_of_reach:
                wanted = 0
            elif offsets[wanted - 1] > held_from + reach.span_max:
                wanted = bisect_right(offsets, held_from + reach.span_max, 0, wanted)
        if wanted < len(offsets):
            done = self.take_all(units[: wanted * UNIT_BYTES], offsets[:wanted])
        else:
            done = self.take_all(units, offsets)
        if done:
            self.last = offsets[done - 1]
        return offsets[done] if done < len(offsets) else -1

    def _turn_to(self, position: int, size: int) -> bool:
        """Go on in the log file that holds the record; False when there is none."""
        segment = self.log.segments.at(position)
        end = 0 if segment is None else segment.base + segment.size
        if segment is None or position + size > end:
            self.is_missing = True
            return False
        self._view, self._base, self._limit = segment.view(), segment.base, end
        return True

    def close(self) -> None:
        """Slice the run that is open. Adjacent records lie in one file (a blank one ends it)."""
        if self._run_start >= 0:
            start, end = self._run_start - self._base, self._run_end - self._base
            self.data.append(self._view[start:end])
            self._run_start = self._run_end = -1


logger = logging.getLogger(__name__)
