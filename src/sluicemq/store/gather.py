"""Collecting the records of a read within its limits, as slices of the log.

No message is copied or decoded: units come in, adjacent records are one slice. With a filter of an
ordinary pull it is also no more than the reader can hold (`Reach`), reckoned from the first match
it has not consumed: a pull names the offset up to which everything is consumed.

Seven hundred conditions on two thousand messages take a quarter of a second: no reader may hold the
loop so long. A read that has to know verdicts which take long ends with a `Judgement` instead: the
caller runs it in any thread, keeps what it found, and reads again, which finds it. A read that has
come to something before it needs one ends there, as one whose time is up.
"""

import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from sluicemq.model.subscription import MessageFilter
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import BLANK_SIZE, UNIT, UNIT_BYTES, Queue, Units
from sluicemq.store.sound import Soundness

PULL_SPAN_MAX: Final = 2000
"""How far apart the matches may lie that a client of ordinary pulls has and has not consumed, as
long as nothing else is known of it (`broker.consume.pacing`).

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
_RUNS_BYTES_MIN: Final = 512 * UNIT_BYTES
"""Fewer units are faster one by one, and ordinary pulls never have so many."""
Select = Callable[[Units], Iterable[int]]
"""Which of some units are wanted: their indices, ascending."""
_unpack_units: Final = UNIT.iter_unpack
_first_position: Final = struct.Struct(">q").unpack_from


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
    lie `span_max` apart. When none of those that come is within that, a `is_patient` reader gets
    nothing, and another one gets as many as if it held nothing.
    """

    consumed: int
    span_max: int = PULL_SPAN_MAX
    is_patient: bool = False


class Gather:
    """Collects records within limits, as slices of the log.

    `reach` None: the reader may hold any number. `held_from` is the first match that it holds (-1:
    none that we know of), `last` the last one that it is given. `judgement`: the read cannot go on
    without. `is_out_of_reach`: there is a match, and the reader has to ask for it once more.
    """

    __slots__ = (
        "_base", "_bytes_max", "_count_max", "_is_bulk", "_limit", "_log", "_queue",
        "_run_end", "_run_start", "_sound", "_view", "count", "data", "held_from", "is_missing",
        "is_out_of_reach", "judgement", "last", "may_postpone", "reach", "size_bytes",
    )  # fmt: skip

    def __init__(
        self,
        log: CommitLog,
        sound: Soundness,
        queue: Queue,
        count_max: int,
        bytes_max: int,
        *,
        is_bulk: bool,
    ) -> None:
        self._log = log
        self._sound = sound
        self._queue = queue
        self._is_bulk = is_bulk
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._run_start = self._run_end = -1  # of adjacent records, not yet sliced
        self._view = memoryview(b"")  # the log file of the run, which holds [_base, _limit)
        self._base = self._limit = 0
        self.data: list[memoryview] = []
        self.count = self.size_bytes = 0
        self.is_missing = self.may_postpone = self.is_out_of_reach = False
        self.reach: Reach | None = None
        self.held_from = self.last = -1
        self.judgement: Judgement | None = None

    @property
    def room(self) -> int:
        """How many more messages may come."""
        return 0 if self.is_missing else self._count_max - self.count

    def take_all(self, units: Units, offsets: Sequence[int]) -> int:
        """Take the units in order; returns how many were dealt with. HOT.

        `offsets` are their queue offsets.
        """
        if len(units) and not self._sound.is_trusted(_first_position(units)[0]):
            is_whole = not self._is_bulk
            units = self._sound.blank_bad(units, self._queue, offsets, is_whole=is_whole)
        if len(units) >= _RUNS_BYTES_MIN:
            done = self._take_runs(units)
            if done:
                return done
        room, total, start, end = self.room, self.size_bytes, self._run_start, self._run_end
        bytes_max = self._bytes_max if self.count else NO_LIMIT  # the first one always passes
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
            bytes_max = self._bytes_max
        self._run_start, self._run_end = start, end
        self.count += taken
        self.size_bytes = total
        return done

    def _take_runs(self, units: Units) -> int:
        """As many of the units as have room, run by run; 0 when they have to be looked at singly,
        and nothing has changed then."""
        from sluicemq.store.bulk import runs_of  # noqa: PLC0415 - NumPy for large reads only

        found = runs_of(units, self.room, self._bytes_max - self.size_bytes)
        if found is None:
            return 0
        for start, end in found.places:
            segment = self._log.segments.at(start)
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
        """Take the units at `indices`; returns the first index that found no room, or -1.

        `position` is the queue offset of the first unit. The chosen ones are put side by side
        first: one pass of `take_all` instead of one for each.
        """
        coming = iter(indices)
        chosen = list(islice(coming, self.room))
        wanted = chosen if self.reach is None else self._within(self.reach, chosen, position)
        begins = [index * UNIT_BYTES for index in wanted]
        done = self.take_all(
            b"".join([units[begin : begin + UNIT_BYTES] for begin in begins]),
            [position + index for index in wanted],
        )
        if done:
            self.last = position + wanted[done - 1]
        return chosen[done] if done < len(chosen) else next(coming, -1)

    def _within(self, reach: Reach, chosen: list[int], position: int) -> list[int]:
        """Those that the reader can hold beside what it holds already."""
        if not chosen:
            return chosen
        first = position + chosen[0]
        if self.held_from < 0:
            self.held_from = first
        elif first - self.held_from > reach.span_max and not self.count:
            if reach.is_patient:
                self.is_out_of_reach = True
                return []
            self.held_from = first  # it holds nothing, or does not count as Java does
        return chosen[: bisect_right(chosen, self.held_from + reach.span_max - position)]

    def _turn_to(self, position: int, size: int) -> bool:
        """Go on in the log file that holds the record; False when there is none."""
        segment = self._log.segments.at(position)
        if segment is None or position + size > segment.end:
            self.is_missing = True
            return False
        self._view, self._base, self._limit = segment.view(), segment.base, segment.end
        return True

    def close(self) -> None:
        """Slice the run that is open. Adjacent records lie in one file (a blank one ends it)."""
        if self._run_start >= 0:
            start, end = self._run_start - self._base, self._run_end - self._base
            self.data.append(self._view[start:end])
            self._run_start = self._run_end = -1
