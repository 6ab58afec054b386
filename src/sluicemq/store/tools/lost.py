"""Which messages a damaged log has lost, and the records that close its holes.

Two witnesses know what is lost: the offsets of the good records (each queue counts in ones, so a
jump from 5 to 9 with a hole between the two records says that 6, 7 and 8 were in it), and the units
of the queues (which say it also at a queue's ends, and how long the records were). A unit alone
counts only where no good record contradicts it: a damaged unit must not make a good message a lost
one.

Recovery, RocketMQ's too, ends the log at the first byte that is no record. So a hole is filled from
its beginning to its end with records that both brokers accept:

    place holder   for each message known to be lost: its topic, queue and offset, an empty body
                   and, where there is room, the property SLUICE_LOST. Offsets stay what they
                   were, also when somebody builds the queues anew from the log; our readers
                   pass over it (`log.PLACEHOLDER_CODE`)
    filler         a rolled-back message: it stands in no queue and in no index
    blank record   where the hole reaches the end of its file

The bytes between are zeros. A hole at the very end of the log gets its place holders only: what
follows them is free.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.model.message import PREPARED
from sluicemq.model.system_names import SCHEDULE_TOPIC
from sluicemq.model.topic import TOPIC_LENGTH_MAX
from sluicemq.record.codec import encode_record
from sluicemq.record.layout import BLANK, MAGIC_BLANK, RECORD_BYTES_MIN
from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.bulk import QueueUnits
from sluicemq.store.log import PLACEHOLDER_CODE, PLACEHOLDER_NAME, PLACEHOLDER_PREPARED_OFFSET
from sluicemq.store.queues import OFFSET_MAX, UNIT_BYTES, is_valid_key
from sluicemq.store.tools.layout import Hole, Run, Series

QueueKey = tuple[str, int]


class Lost(NamedTuple):
    """A message that is gone: about where in the log it lay (exactly, when a unit told)."""

    position: int
    key: QueueKey
    offset: int


class _Gap(NamedTuple):
    """The offsets [first, end) of a queue are missing between two places in the log."""

    first: int
    end: int
    after: int
    before: int


class _Place(NamedTuple):
    """A record of a queue: its offset, where it lies and ends."""

    offset: int
    position: int
    end: int
    is_holder: bool = False
    """It holds the place of a lost message, maybe before the place where that one lay."""


@dataclass(slots=True)
class _Seen:
    """What the good records say of a queue."""

    first: _Place
    last: _Place
    gaps: list[_Gap] = field(default_factory=list)
    suspect: _Place | None = None

    def is_plausible(self, place: _Place) -> bool:
        """A record's offset has no checksum: one that goes back, or skips more than there is room
        for, may be damaged (as in `store.recovery`).
        """
        skipped = place.offset - self.last.offset
        has_room = skipped * RECORD_BYTES_MIN <= place.position - self.last.position
        return skipped > 0 and (has_room or self.last.is_holder)

    def accept(self, place: _Place) -> None:
        if place.offset > self.last.offset + 1:
            gap = _Gap(self.last.offset + 1, place.offset, self.last.position, place.position)
            self.gaps.append(gap)
        self.last = place

    def may_lack(self, offset: int, position: int) -> bool:
        """Whether the records leave room for one with this offset at this place."""
        if position < self.first.position:
            return offset < self.first.offset
        if position > self.last.position:
            return offset > self.last.offset
        at = bisect_right(self.gaps, position, key=lambda gap: gap.after) - 1
        if at < 0:
            return False
        gap = self.gaps[at]
        return gap.first <= offset < gap.end and position < gap.before


def _place(group: QueueUnits, row: int) -> _Place:
    position, size, code = group.units[row].tolist()
    return _Place(int(group.offsets[row]), position, position + size, code == PLACEHOLDER_CODE)


class Inventory:
    """Counts the good records of all queues as a walk finds them; then knows what is lost."""

    def __init__(self, log_start: int, queues: dict[QueueKey, Series]) -> None:
        self._log_start = log_start
        self._queues = queues
        self._seen: dict[QueueKey, _Seen] = {}
        self.records = 0
        self.contradicted: dict[Hole, QueueKey] = {}
        """Records whose offset cannot be in the queue that they name; complete after `finish`."""
        self.doubtful: set[int] = set()
        """Positions of records that may or may not be right: no queue gets them, they stay."""

    def add(self, run: Run) -> None:
        self.records += len(run)
        for group in run.groups:
            key = (group.topic.decode(errors="replace"), group.queue_id)
            # Two in a row confirm each other, and with them all that follow.
            is_consecutive = group.is_consecutive and len(group.offsets) > 1
            for row in range(2 if is_consecutive else len(group.offsets)):
                self._add(key, _place(group, row))
            seen = self._seen.get(key)
            if is_consecutive and seen is not None and seen.suspect is None:
                seen.last = _place(group, -1)

    def _add(self, key: QueueKey, place: _Place) -> None:
        if not is_valid_key(key) or not 0 <= place.offset <= OFFSET_MAX:
            self._contradict(key, place)
            return
        seen = self._seen.get(key)
        if seen is None:
            has_room = place.offset * RECORD_BYTES_MIN <= place.position
            if has_room or self._log_start or place.is_holder:
                self._seen[key] = _Seen(place, place)
            else:
                self._contradict(key, place)  # so many cannot have been before it
            return
        suspect, seen.suspect = seen.suspect, None
        if suspect is not None:
            # Do the queue's files know the record before, and at this offset another record?
            series = self._queues.get(key)
            known = _position_of_unit(series, suspect.offset)
            is_denied = (
                known not in (None, suspect.position)
                and _position_of_unit(series, seen.last.offset) == seen.last.position
            )
            if suspect.offset + 1 == place.offset and not is_denied:
                if suspect.offset and seen.first == seen.last:
                    self._contradict(key, seen.first)  # not the two, but the one before is wrong
                    seen.first = suspect
                seen.last = suspect  # the topic was made again, or the queue goes on from there
            else:
                self._contradict(key, suspect)
        if seen.is_plausible(place):
            seen.accept(place)
        else:
            seen.suspect = place

    def _contradict(self, key: QueueKey, place: _Place) -> None:
        reason = f"it says that it is message {place.offset} of queue {key[0]}/{key[1]}"
        self.contradicted[Hole(place.position, place.end, f"{reason}, which cannot be")] = key

    def finish(self, queues: dict[QueueKey, Series]) -> None:
        """Judge the records that were still in doubt at the end of the log."""
        for key, seen in list(self._seen.items()):
            place, seen.suspect = seen.suspect, None
            if place is None:
                first, series = seen.first, queues.get(key)
                if first == seen.last and series is not None:
                    is_known = _position_of_unit(series, first.offset) == first.position
                    size = first.end - first.position
                    others = () if is_known else _units(series)  # by another offset than its own?
                    if any(((u["position"] == first.position) & (u["size"] == size)).any()
                           for _, u in others):  # fmt: skip
                        self._contradict(key, first)
                        del self._seen[key]
                continue
            position = _position_of_unit(queues.get(key), place.offset)
            is_lone = seen.first == seen.last
            if position == place.position:
                if is_lone and place.offset:
                    self._contradict(key, seen.first)
                    seen.first = place
                seen.last = place
            elif place.offset == 0 and not position:
                seen.last = place  # the topic was made again, and has one message
            elif position is not None and position in (seen.first.position, seen.last.position):
                self._contradict(key, place)
            else:
                self.doubtful.add(place.position)

    def lost(self, holes: list[Hole], queues: dict[QueueKey, Series]) -> list[Lost]:
        """The messages that lay in these holes, in the order in which they may be put back."""
        starts = [hole.start for hole in holes]
        found: list[Lost] = []
        for key in sorted(self._seen.keys() | queues.keys()):
            series = queues.get(key)
            known = self._from_units(key, series, holes) if series is not None and holes else {}
            seen = self._seen.get(key)
            gaps = [] if seen is None else seen.gaps
            # Before the first record too when the log is there from its beginning, and something
            # else than this record tells of the queue.
            if seen is not None and not self._log_start:
                first = seen.first
                is_told = _position_of_unit(series, first.offset) == first.position
                has_room = 0 < first.offset * RECORD_BYTES_MIN <= first.position
                if has_room and (is_told or seen.last != first):
                    gaps = [_Gap(0, first.offset, -1, first.position), *gaps]
            for gap in gaps:
                hole = bisect_left(starts, gap.after)
                if hole == len(holes) or holes[hole].start >= gap.before:
                    continue  # no damage between the two: the queue was like this
                position = holes[hole].start
                for offset in range(gap.first, gap.end):
                    position = known.pop(offset, position)
                    found.append(Lost(position, key, offset))
            found += [Lost(position, key, offset) for offset, position in known.items()]
        return sorted(found)

    def _from_units(self, key: QueueKey, series: Series, holes: list[Hole]) -> dict[int, int]:
        """Offset -> position of the units that point into holes and contradict no record. Without
        those that lie before one with a smaller offset: they are damaged.
        """
        seen = self._seen.get(key)
        known: dict[int, int] = {}
        last = -1
        starts, ends = np.array([hole[:2] for hole in holes]).T
        for first, units in _units(series):
            places = units["position"].astype(np.int64)
            holes_of = np.searchsorted(starts, places, side="right") - 1
            inside = (holes_of >= 0) & (units["size"] >= RECORD_BYTES_MIN)
            inside &= places + units["size"] <= ends[np.maximum(holes_of, 0)]
            if self._log_start == 0:  # so many have been before it
                inside &= (first + np.arange(len(units))) * RECORD_BYTES_MIN <= places
            for row in np.flatnonzero(inside).tolist():
                offset, position = first + row, int(places[row])
                if position > last and (seen is None or seen.may_lack(offset, position)):
                    known[offset] = last = position
        return known


def _position_of_unit(series: Series | None, offset: int) -> int | None:
    """Where the queue's files say that the message lies; None when they do not say."""
    data = series.read(offset * UNIT_BYTES, UNIT_BYTES) if series is not None else b""
    return int.from_bytes(data[:8]) if len(data) == UNIT_BYTES and any(data[8:12]) else None


def _units(series: Series) -> Iterator[tuple[int, NDArray[Any]]]:
    """(queue offset of the first, units) of the parts of the files that may hold something."""
    for at, data in series.data(align=UNIT_BYTES):
        yield at // UNIT_BYTES, np.frombuffer(data, UNIT_COLUMNS)


FILLER_BYTES_MAX: Final = 1 << 20
FILLER_BYTES_MIN: Final = RECORD_BYTES_MIN + 1
_FILLER_BYTES: Final = RECORD_BYTES_MIN + len(PLACEHOLDER_NAME)
_ROLLBACK: Final = PREPARED | 8
_HOST: Final = bytes((127, 0, 0, 1, 0, 0, 0, 0))
_HEAD_BYTES: Final = 88
_PROPERTIES: Final = f"{PLACEHOLDER_NAME}\x011\x02".encode()
_DELAYED: Final = f"REAL_TOPIC\x01{PLACEHOLDER_NAME}\x02REAL_QID\x010\x02".encode()
"""Where a broker's delayed delivery sends the place holder of a delayed message."""

Piece = tuple[int, bytes]


class Bridge(NamedTuple):
    """What to write into a hole: pieces by position, zeros between; where the log goes on."""

    pieces: list[Piece]
    end: int
    placed: list[Lost]
    left_out: list[Lost]


def build_bridge(
    hole: Hole, file_end: int, lost: list[Lost], time_ms: int, *, is_last: bool
) -> Bridge:
    """Fill the hole. `time_ms` is the store time that its records bear; it is at the log's end
    (`is_last`) or has good records behind it. What finds no room is `left_out`.
    """
    room_end = hole.end - (BLANK.size if hole.end == file_end else 0)
    is_marked = sum(_size(item, True) for item in lost) <= room_end - hole.start
    pieces: list[Piece] = []
    placed: list[Lost] = []
    left_out: list[Lost] = []
    at = hole.start
    for item in lost:
        size = _size(item, is_marked)
        if at + size > room_end:
            left_out.append(item)
            continue
        pieces.append((at, _place_holder(item, at, time_ms, is_marked=is_marked)))
        placed.append(item)
        at += size
    if is_last:
        return Bridge(pieces, at, placed, left_out)
    if hole.end == file_end:
        # One more record: a file must not begin with a blank one, since brokers look at the first
        # record of a file to see how old it is.
        if file_end - at >= _FILLER_BYTES + BLANK.size:
            pieces += _filler(at, _FILLER_BYTES, time_ms)
            at += _FILLER_BYTES
        if file_end > at:
            pieces.append((at, BLANK.struct.pack(file_end - at, MAGIC_BLANK)))
    elif 0 < hole.end - at < FILLER_BYTES_MIN and placed:
        at, _ = pieces.pop()
        body = bytes(hole.end - at - _size(placed[-1], is_marked))
        pieces.append((at, _place_holder(placed[-1], at, time_ms, body, is_marked=is_marked)))
        at = hole.end
    while at < hole.end < file_end:  # the heads and the ends of fillers, their bodies are zeros
        size = min(hole.end - at, FILLER_BYTES_MAX)
        if 0 < hole.end - at - size < FILLER_BYTES_MIN:
            size -= FILLER_BYTES_MIN
        pieces += _filler(at, size, time_ms)
        at += size
    return Bridge(pieces, hole.end, placed, left_out)


def _properties(item: Lost, is_marked: bool) -> bytes:
    if not is_marked:
        return b""
    return _PROPERTIES + _DELAYED if item.key[0] == SCHEDULE_TOPIC else _PROPERTIES


def _size(item: Lost, is_marked: bool) -> int:
    name = item.key[0].encode()
    extra = 1 if len(name) > TOPIC_LENGTH_MAX else 0
    return RECORD_BYTES_MIN + extra + len(name) + len(_properties(item, is_marked))


def _place_holder(
    item: Lost, position: int, time_ms: int, body: bytes = b"", *, is_marked: bool
) -> bytes:
    (topic, queue_id), offset = item.key, item.offset
    properties = _properties(item, is_marked)
    return _record(
        topic, queue_id, offset, position, body, properties, 0, time_ms, PLACEHOLDER_PREPARED_OFFSET
    )


def _filler(at: int, size: int, time_ms: int) -> list[Piece]:
    topic = PLACEHOLDER_NAME[: max(1, size - RECORD_BYTES_MIN)]
    body = bytes(size - RECORD_BYTES_MIN - len(topic))
    record = _record(topic, 0, 0, at, body, b"", _ROLLBACK, time_ms)
    tail = len(topic) + 3
    return [(at, record[:_HEAD_BYTES]), (at + size - tail, record[-tail:])]


def _record(
    topic: str,
    queue_id: int,
    offset: int,
    position: int,
    body: bytes,
    properties: bytes,
    sys_flag: int,
    time_ms: int,
    prepared_offset: int = 0,
) -> bytes:
    return encode_record(
        topic=topic, queue_id=queue_id, queue_offset=offset, physical_offset=position, body=body,
        properties=properties, flag=0, sys_flag=sys_flag, born_time_ms=time_ms, born_host=_HOST,
        store_time_ms=time_ms, store_host=_HOST, prepared_offset=prepared_offset,
    )  # fmt: skip
