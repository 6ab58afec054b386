"""Counting the messages of a queue that a subscription really brings to its consumer.

    *        every one: the difference of two offsets
    tags     the codes in the consume queue are compared, as a pull does, and of each hit the tag
             itself: two tags may have the same code, and the client drops what it did not ask for
    SQL92    verdicts on blocks of property columns; the record where they cannot tell, or without
             columns

What was counted once is kept as a `Tally` of a range of the queue. When the range moves on, only
what it has left behind and what is new are looked at: `count = tally - left + new`, which is exact
because stored messages do not change. How fast both go is where an estimate of the time comes from.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from sluicemq.broker.lanes.filters import RuleColumns, RuleFilter
from sluicemq.broker.lanes.places import Place
from sluicemq.broker.lanes.rules import EVERYTHING, Rule, clause
from sluicemq.filter.evaluate import Verdict
from sluicemq.filter.plan import FALSE, NEEDS_RECORD, TRUE, verdict_of
from sluicemq.filter.selector import Vectorised
from sluicemq.filter.subscriptions import compile_sql92, is_tag_kind, parse_tags, unknown_kind
from sluicemq.model.message import TAGS
from sluicemq.model.subscription import ALL, SQL92, Subscription
from sluicemq.net.work.background import Job, WorkItem
from sluicemq.record.codec import decode_properties, properties_slice
from sluicemq.record.columns import ColumnBlock
from sluicemq.store.gather import INLINE_WEIGHT_MAX
from sluicemq.store.queues import BLANK_SIZE, UNIT, UNIT_BYTES
from sluicemq.store.store import Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sluicemq.store.columns.blocks import Load

TAG_UNITS: Final = 1 << 16
RECORDS_A_STEP: Final = 256
ROWS_A_STEP: Final = 64
"""So many of them are judged in a step."""
PARTS_A_JOB: Final = 4
ROWS_INLINE: Final = 8192
"""Larger blocks take milliseconds: they are judged in another thread; smaller ones too when the
expression is long (`INLINE_WEIGHT_MAX`)."""
SAMPLES_KEPT: Final = 16
TALLIES_KEPT: Final = 65_536


class Records:
    """Properties of stored messages, one by one: the slow way."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def at(self, topic: str, queue_id: int, offset: int) -> dict[str, str] | None:
        """None when no message lies there."""
        units = self._store.reader.units(topic, queue_id, offset, 1)
        return self._of_unit(*UNIT.unpack(units)[:2]) if len(units) else None

    def between(
        self, topic: str, queue_id: int, start: int, end: int
    ) -> Iterator[tuple[int, dict[str, str]]]:
        """(offset, properties) of the messages with offsets [start, end) that are there."""
        while start < end:
            units = self._store.reader.units(
                topic, queue_id, start, min(end - start, RECORDS_A_STEP)
            )
            if not len(units):
                return
            for position, size, _ in UNIT.iter_unpack(units):
                properties = self._of_unit(position, size)
                if properties is not None:
                    yield start, properties
                start += 1

    def of_hits(self, units: memoryview | bytearray | bytes, hits: list[int]) -> Iterator[str]:
        """The tags of some of the units, "" without one."""
        for index in hits:
            position, size, _ = UNIT.unpack_from(units, index * UNIT_BYTES)
            properties = self._of_unit(position, size)
            yield "" if properties is None else properties.get(TAGS, "")

    def _of_unit(self, position: int, size: int) -> dict[str, str] | None:
        view = None if size == BLANK_SIZE else self._store.reader.view_at(position)
        if view is None or len(view) < size:
            return None
        record = view[:size]
        return decode_properties(record[properties_slice(record)])


class Wanted:
    """What a subscription wants, ready to be counted. `key` tells it from others.

    Raises FilterSyntaxError when the expression does not compile or its kind is unknown."""

    __slots__ = ("codes", "is_nothing", "key", "tags", "vectorised", "verdict", "weight")

    def __init__(self, subscription: Subscription) -> None:
        self.key: tuple[str, object] = (subscription.kind, subscription.expression)
        self.codes: frozenset[int] | None = None
        self.tags: frozenset[str] = frozenset()
        self.vectorised: Vectorised | RuleColumns | None = None
        self.is_nothing = False
        self.weight = 0
        self.verdict: Verdict | None = None
        if not is_tag_kind(subscription.kind):
            if subscription.kind != SQL92:
                raise unknown_kind(subscription.kind)
            selector = compile_sql92(subscription.expression)
            self.weight = len(subscription.expression)
            self.vectorised, self.verdict = selector.vectorised, selector.evaluate
        elif subscription.expression != ALL:
            _, tags, codes = parse_tags(subscription.expression)
            self.tags = subscription.tags or tags
            self.codes = subscription.codes or codes

    @classmethod
    def of_rule(cls, rule: Rule) -> "Wanted":
        """What a lane's rule wants."""
        made = cls(Subscription("", ALL))
        made.key = ("RULE", rule)
        judge = RuleFilter(rule)
        made.weight = judge.weight
        if rule != clause([EVERYTHING]):
            made.vectorised, made.verdict = judge.vectorised, judge.by_commit_log
        made.is_nothing = not rule
        return made

    @property
    def is_everything(self) -> bool:
        return self.codes is None and self.vectorised is None

    def is_quick_on(self, rows: int) -> bool:
        """Are so many rows judged in a millisecond or two?"""
        return rows <= ROWS_INLINE and self.weight <= INLINE_WEIGHT_MAX


@dataclass(frozen=True, slots=True)
class Tally:
    """So many of the messages [start, end) match. `place`: where the last of them lies, by which a
    topic that was deleted and made again is known. `passed` and `arrived`: matches that the range
    has left behind and taken in since it was first counted, `samples` of both with their times."""

    start: int
    end: int
    count: int
    place: int
    passed: int
    arrived: int
    samples: deque[tuple[float, int, int]]

    @property
    def eta_s(self) -> float | None:
        """When the range will hold no match, at the pace of the samples; None: not known, or never
        at this pace."""
        if not self.count:
            return 0.0
        (begin_s, passed, arrived), (end_s, *_) = self.samples[0], self.samples[-1]
        drained = (self.passed - passed) - (self.arrived - arrived)
        return self.count * (end_s - begin_s) / drained if drained > 0 else None


class Matching:
    """Counts in the queues of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.records = Records(store)
        self._tallies: dict[tuple[str, str, int], tuple[tuple[str, object], Tally]] = {}

    def lag(
        self, group: str, topic: str, queue_id: int, wanted: Wanted, start: int, now_s: float
    ) -> WorkItem[Tally]:
        """Of the messages from `start` to the end of the queue."""
        key = (group, topic, queue_id)
        first, end = self._store.queue_offsets(topic, queue_id)
        start = min(max(start, first), end)
        count = partial(self.count, topic, queue_id, wanted)
        kept, known = self._tallies.get(key, (None, None))
        if known is not None and (
            kept != wanted.key
            or known.start < first
            or known.place != self._place(topic, queue_id, known.end - 1)
        ):
            known = None
        if known is not None and known.start <= start <= known.end <= end:
            if start - known.start <= known.end - start:  # the shorter part tells of both
                passed = yield from count(known.start, start)
            else:
                passed = known.count - (yield from count(start, known.end))
            arrived = yield from count(known.end, end)
            total = known.count - passed + arrived
            passed, arrived = known.passed + passed, known.arrived + arrived
            samples = known.samples.copy()
        else:
            if known is not None and start < known.start <= known.end <= end:  # it went back
                before = yield from count(start, known.start)
                total = before + known.count + (yield from count(known.end, end))
            else:
                total = yield from count(start, end)
            passed, arrived, samples = 0, 0, deque(maxlen=SAMPLES_KEPT)
        samples.append((now_s, passed, arrived))
        place = self._place(topic, queue_id, end - 1)
        tally = Tally(start, end, total, place, passed, arrived, samples)
        went = self._store.queue_offsets(topic, queue_id)[0] > start  # while we were counting
        if not went and (place >= 0 or start == end):
            self._tallies[key] = (wanted.key, tally)
            if len(self._tallies) > TALLIES_KEPT:
                del self._tallies[next(iter(self._tallies))]
        return tally

    def lane_lag(
        self, name: str, topic: str, queue_id: int, place: Place, now_s: float
    ) -> WorkItem[Tally]:
        """Of a lane, by its rules from its place on. The one that holds to the end is counted by
        what is known of it, those before it anew: they are gone when the lane has passed them."""
        first, end = self._store.queue_offsets(topic, queue_id)
        start = at = min(max(place.position, first), end)
        closed: list[tuple[int, int, Rule]] = []
        rule, until = place.rule_at(at)
        while until is not None and until < end:
            closed.append((at, until, rule))
            at = until
            rule, until = place.rule_at(at)
        tally = yield from self.lag(name, topic, queue_id, Wanted.of_rule(rule), at, now_s)
        count = tally.count
        for low, high, other in closed:
            count += yield from self.count(topic, queue_id, Wanted.of_rule(other), low, high)
        return replace(tally, start=start, count=count)

    def _place(self, topic: str, queue_id: int, offset: int) -> int:
        units = self._store.reader.units(topic, queue_id, offset, 1) if offset >= 0 else b""
        return int(UNIT.unpack(units)[0]) if len(units) else -1

    def count(
        self, topic: str, queue_id: int, wanted: Wanted, start: int, end: int
    ) -> WorkItem[int]:
        """Matches among the messages [start, end)."""
        if start >= end or wanted.is_nothing:
            return 0
        if wanted.is_everything:
            return end - start
        if wanted.codes is not None:
            return (yield from self._count_tags(topic, queue_id, wanted, start, end))
        columns = self._store.columns
        if not columns.is_warm:
            yield columns.warm_up
        assert wanted.vectorised is not None
        parts = columns.parts(topic, queue_id, start, end, wanted.vectorised)
        if parts is None:
            return (yield from self._count_verdicts(topic, queue_id, wanted, start, end))
        total = 0
        while batch := list(islice(parts, PARTS_A_JOB)):
            total += yield from self._count_batch(topic, queue_id, wanted, batch)
        return total

    def _count_batch(
        self, topic: str, queue_id: int, wanted: Wanted, batch: "list[ColumnBlock | Load]"
    ) -> WorkItem[int]:
        """Of some blocks in one job, those that are not in memory too."""
        vectorised = wanted.vectorised
        assert vectorised is not None
        counts: list[int | None] = []

        def job() -> None:
            """In any thread. None where records have to be asked, or a block cannot be had."""
            for part in batch:
                block = part if isinstance(part, ColumnBlock) else part.run()
                if block is not None:
                    counts.append(vectorised.count(block))
                else:
                    is_passed = not isinstance(part, ColumnBlock) and part.is_passed
                    counts.append(0 if is_passed else None)

        loads = [part for part in batch if not isinstance(part, ColumnBlock)]
        rows = sum(part.rows for part in batch if isinstance(part, ColumnBlock))
        if loads or not wanted.is_quick_on(rows):
            yield job
        else:
            job()
            yield None
        for load in loads:
            self._store.columns.loaded(load)
        total = 0
        for part, count in zip(batch, counts, strict=True):
            if count is None:
                first = part.first_offset if isinstance(part, ColumnBlock) else part.start
                count = yield from self._count_verdicts(topic, queue_id, wanted, first, part.end)  # noqa: PLW2901
            total += count
        return total

    def _count_verdicts(
        self, topic: str, queue_id: int, wanted: Wanted, start: int, end: int
    ) -> WorkItem[int]:
        """Row by row, the records where columns cannot tell."""
        total = 0
        for found in self.verdicts(topic, queue_id, wanted, start, end, only_matches=True):
            if callable(found):
                yield found
            else:
                total += 0 if found is None else found[1].tobytes().count(TRUE)
                yield None
        return total

    def verdicts(
        self,
        topic: str,
        queue_id: int,
        wanted: Wanted,
        start: int,
        end: int,
        *,
        only_matches: bool = False,
    ) -> "Iterator[Job | tuple[int, NDArray[np.uint8]] | None]":
        """For SQL92: verdicts on the messages [start, end), in order, each array with the offset of
        its first one; between them jobs to offload, and None where others may have their turn.
        `only_matches`: blocks without a match may be left out.
        """
        columns = self._store.columns
        if not columns.is_warm:
            yield columns.warm_up
        pruning = wanted.vectorised if only_matches else None
        blocks = columns.blocks(topic, queue_id, start, end, pruning)
        if blocks is None:
            import numpy as np  # noqa: PLC0415 - only when somebody filters

            for low in range(start, end, RECORDS_A_STEP):
                high = min(low + RECORDS_A_STEP, end)
                verdicts = np.zeros(high - low, np.uint8)
                records = dict(self.records.between(topic, queue_id, low, high))
                rows = [offset - low for offset in records]
                yield from _judge_records(wanted, rows, list(records.values()), verdicts)
                yield low, verdicts
            return
        vectorised = wanted.vectorised
        assert vectorised is not None
        for block in blocks:
            judged: list[NDArray[np.uint8]] = []

            def judge(block: ColumnBlock = block) -> None:  # in any thread
                judged.append(vectorised.verdicts(block))  # noqa: B023 - before the next block

            if wanted.is_quick_on(block.rows):
                judge()
            else:
                yield judge
            verdicts = judged[0]
            if NEEDS_RECORD in verdicts:
                verdicts = verdicts.copy()
                asked = iter((verdicts == NEEDS_RECORD).nonzero()[0].tolist())
                while chunk := list(islice(asked, RECORDS_A_STEP)):
                    at = partial(self.records.at, topic, queue_id)
                    found = [at(block.first_offset + row) for row in chunk]
                    yield from _judge_records(wanted, chunk, found, verdicts)
            yield block.first_offset, verdicts

    def _count_tags(
        self, topic: str, queue_id: int, wanted: Wanted, start: int, end: int
    ) -> WorkItem[int]:
        from sluicemq.store import bulk  # noqa: PLC0415 - NumPy only when somebody filters

        assert wanted.codes is not None
        columns = self._store.columns
        if end - start > TAG_UNITS and not columns.is_warm:
            yield columns.warm_up
        total = 0
        while start < end:
            part = columns.part_made(topic, queue_id, start, end)
            stop = end if part is None else part.end
            units = self._store.reader.units(topic, queue_id, start, min(stop - start, TAG_UNITS))
            if not len(units):
                break
            hits = bulk.find_tag_codes(units, wanted.codes).tolist()
            if hits:
                total += yield from self._count_hits(wanted, bytes(units), hits, part)
            start += len(units) // UNIT_BYTES
            yield None
        return total

    def _count_hits(
        self,
        wanted: Wanted,
        units: bytes,
        hits: list[int],
        part: "ColumnBlock | Load | None",
    ) -> WorkItem[int]:
        """Of units with a code that is wanted, those whose tag is; `part` has the tags of all
        units in the queue from the first of these on."""
        block: ColumnBlock | None = None
        if isinstance(part, ColumnBlock):
            block = part
        elif part is not None:
            yield part.run
            self._store.columns.loaded(part)
            block = None if part.block is None else part.block.part(part.start, part.end)
        count = None if block is None else _count_rows(wanted, block, hits)
        if part is None and len(hits) >= RECORDS_A_STEP:  # few ones are read one by one
            begins = [hit * UNIT_BYTES for hit in hits]
            joined = b"".join([units[begin : begin + UNIT_BYTES] for begin in begins])
            if (picked := self._store.columns.picked(joined)) is not None:
                made: list[ColumnBlock] = []
                yield lambda: made.append(picked())
                count = _count_rows(wanted, made[0], range(len(hits)))
        if count is not None:
            return count
        total, coming = 0, iter(hits)
        while chunk := list(islice(coming, RECORDS_A_STEP)):
            total += sum(tag in wanted.tags for tag in self.records.of_hits(units, chunk))
            yield None
        return total


def _count_rows(wanted: Wanted, block: "ColumnBlock", rows: Sequence[int]) -> int | None:
    """How many of these rows have a tag that is wanted; None when columns cannot tell."""
    import numpy as np  # noqa: PLC0415 - only when somebody filters

    if len(block.odd) or TAGS in block.excluded:
        return None
    column = block.columns.get(TAGS)
    if column is None:
        return len(rows) if "" in wanted.tags else 0
    codes = [at for at, tag in enumerate(column.values) if tag in wanted.tags]
    if "" in wanted.tags:
        codes.append(-1)
    return int(np.isin(column.codes[np.array(rows, np.intp)], codes).sum())


def _judge_records(
    wanted: Wanted,
    rows: list[int],
    found: Sequence[Mapping[str, str] | None],
    verdicts: "NDArray[np.uint8]",
) -> Iterator[Job | None]:
    """By the properties of these rows, None where there is no message."""
    verdict = wanted.verdict
    assert verdict is not None

    def judge(start: int, stop: int) -> None:
        for row, properties in zip(rows[start:stop], found[start:stop], strict=True):
            verdicts[row] = FALSE if properties is None else verdict_of(verdict, properties)

    if wanted.weight > INLINE_WEIGHT_MAX:
        yield partial(judge, 0, len(rows))
        return
    for start in range(0, len(rows), ROWS_A_STEP):
        judge(start, start + ROWS_A_STEP)
        yield None
