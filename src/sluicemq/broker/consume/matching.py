"""Counting the messages of a queue that match a subscription.

    *        every message: the difference of two offsets
    tags     the tag codes in the consume queue are compared, as a pull does, and then the tag of
             each hit: two tags may have the same code, and the client drops messages with a tag
             that it did not ask for
    SQL92    verdicts on blocks of property columns, and on the record itself where the columns
             cannot decide or do not exist

A count is kept as a `Tally` of an offset range. When the range moves on, only the messages that it
left behind and the new ones are examined: `count = tally - passed + arrived`. This is exact,
because stored messages do not change. The speed of both gives the estimate of the time until the
range is empty.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.broker.lanes.filters import RuleColumnFilter, RuleFilter
from sluicemq.broker.lanes.lane import Lane
from sluicemq.broker.lanes.lane_queue import LaneQueue
from sluicemq.broker.lanes.rules import MATCH_ALL, LaneRule, create_rule
from sluicemq.filter.evaluate import ConditionFunction
from sluicemq.filter.plan import FALSE, NEEDS_RECORD, TRUE, evaluate_verdict
from sluicemq.filter.selector import Vectorised
from sluicemq.filter.subscriptions import compile_sql92, is_tag_kind, parse_tags, unknown_kind_error
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
"""The number of units whose tag codes are compared in one step."""
RECORDS_PER_STEP: Final = 256
"""The number of records that are read in one step."""
ROWS_PER_STEP: Final = 64
"""The number of records that are evaluated in one step."""
BLOCKS_PER_JOB: Final = 4
"""The number of blocks that are counted in one job."""
ROWS_INLINE: Final = 8192
"""The most rows of a block that is evaluated on the event loop.

Larger blocks take milliseconds and are evaluated on another thread, as are smaller ones with a long
expression (`INLINE_WEIGHT_MAX`).
"""
SAMPLES_KEPT: Final = 16
"""The number of samples in a `Tally`."""
TALLIES_KEPT: Final = 65_536
"""The most tallies that are kept."""


class BlockVerdicts(NamedTuple):
    """The verdicts of a filter on consecutive messages, the first one at `first_offset`."""

    first_offset: int
    verdicts: "NDArray[np.uint8]"
    """One verdict of `filter.plan` for each message, such as TRUE, FALSE or ERROR."""


class StoredProperties:
    """The properties of stored messages, read record by record. This is slow."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read_at(self, topic: str, queue_id: int, offset: int) -> dict[str, str] | None:
        """Return the properties of the message at `offset`; None if there is no message."""
        units = self._store.reader.units(topic, queue_id, offset, 1)
        return self._read_unit(*UNIT.unpack(units)[:2]) if len(units) else None

    def iter_range(
        self, topic: str, queue_id: int, start: int, end: int
    ) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield (offset, properties) of each existing message in [`start`, `end`).

        Offsets without a record are skipped. Stop at the first offset without a unit.
        """
        while start < end:
            units = self._store.reader.units(
                topic, queue_id, start, min(end - start, RECORDS_PER_STEP)
            )
            if not len(units):
                return
            for offset, (position, size, _) in enumerate(UNIT.iter_unpack(units), start):
                properties = self._read_unit(position, size)
                if properties is not None:
                    yield offset, properties
            start += len(units) // UNIT_BYTES

    def iter_tags(self, units: memoryview | bytearray | bytes, hits: list[int]) -> Iterator[str]:
        """Yield the tag of each unit whose index is in `hits`; "" for a message without a tag."""
        for index in hits:
            position, size, _ = UNIT.unpack_from(units, index * UNIT_BYTES)
            properties = self._read_unit(position, size)
            yield "" if properties is None else properties.get(TAGS, "")

    def _read_unit(self, position: int, size: int) -> dict[str, str] | None:
        """Return the properties of the record that a unit locates; None if there is no record."""
        view = None if size == BLANK_SIZE else self._store.reader.view_at(position)
        if view is None or len(view) < size:
            return None
        record = view[:size]
        return decode_properties(record[properties_slice(record)])


class MatchCriteria:
    """What a subscription or the rule of a lane matches, prepared for counting.

    `key` identifies the criteria. A filter by tags sets `tags` and their `codes`. An SQL92 filter,
    or the rule of a lane, sets `vectorised`, which evaluates blocks of columns, `verdict`, which
    evaluates the properties of one message, and `weight`, the length of its expressions. If
    `codes` and `vectorised` are None, every message matches.
    """

    __slots__ = ("codes", "key", "matches_nothing", "tags", "vectorised", "verdict", "weight")

    def __init__(self, subscription: Subscription) -> None:
        """Compile the filter of `subscription`.

        Raises FilterSyntaxError if the expression does not compile or its kind is unknown.
        """
        self.key: tuple[str, object] = (subscription.kind, subscription.expression)
        self.codes: frozenset[int] | None = None
        self.tags: frozenset[str] = frozenset()
        self.vectorised: Vectorised | RuleColumnFilter | None = None
        self.matches_nothing = False
        self.weight = 0
        self.verdict: ConditionFunction | None = None
        if not is_tag_kind(subscription.kind):
            if subscription.kind != SQL92:
                raise unknown_kind_error(subscription.kind)
            selector = compile_sql92(subscription.expression)
            self.weight = len(subscription.expression)
            self.vectorised = selector.vectorised
            self.verdict = selector.evaluate
        elif subscription.expression != ALL:
            _, tags, codes = parse_tags(subscription.expression)
            self.tags = subscription.tags or tags
            self.codes = subscription.codes or codes

    @classmethod
    def from_rule(cls, rule: LaneRule) -> "MatchCriteria":
        """Return the criteria of a lane's rule.

        They match every message if the rule does, and none if the rule has no clause.
        """
        criteria = cls(Subscription("", ALL))
        criteria.key = ("RULE", rule)
        rule_filter = RuleFilter(rule)
        criteria.weight = rule_filter.weight
        if rule != create_rule([MATCH_ALL]):
            criteria.vectorised = rule_filter.vectorised
            criteria.verdict = rule_filter.by_commit_log
        criteria.matches_nothing = not rule
        return criteria

    @property
    def matches_everything(self) -> bool:
        """Whether every message matches."""
        return self.codes is None and self.vectorised is None

    def is_fast_for(self, rows: int) -> bool:
        """Return whether this many rows are evaluated within a millisecond or two."""
        return rows <= ROWS_INLINE and self.weight <= INLINE_WEIGHT_MAX


@dataclass(frozen=True, slots=True)
class Tally:
    """The number `count` of matches among the messages [`start`, `end`) of a queue.

    `last_position` is the log position of the last of these messages, by which a topic that was
    deleted and created again is recognised. `passed_count` and `arrived_count` are the matches that
    the range has left behind and taken in since it was first counted. `samples` are (monotonic
    time, passed, arrived).
    """

    start: int
    end: int
    count: int
    last_position: int
    passed_count: int
    arrived_count: int
    samples: deque[tuple[float, int, int]]

    @property
    def eta_s(self) -> float | None:
        """The seconds until the range will contain no match, at the speed of the samples.

        It is 0.0 if the range contains no match, and None if the number of matches does not fall,
        or if there is only one sample.
        """
        if not self.count:
            return 0.0
        first_s, first_passed, first_arrived = self.samples[0]
        last_s, *_ = self.samples[-1]
        passed = self.passed_count - first_passed
        arrived = self.arrived_count - first_arrived
        drained = passed - arrived
        return self.count * (last_s - first_s) / drained if drained > 0 else None


class QueueLag(NamedTuple):
    """The lag of a group in one queue.

    - `committed` is the offset from which on the lag is counted.
    - `offset_min` and `offset_max` are the first offset of the queue, and the end of the count.
    - `tally` counts the matching messages; None if the filter of the group is unknown.
    - `lanes` has each lane with its tally, from the lane's own offset on.
    - `in_flight` is the number of popped messages that are not acknowledged.
    - `extra` is the number of unfinished messages before `committed`, negative if messages behind
      it are done (`UnfinishedMessages`).
    """

    queue_id: int
    committed: int
    offset_min: int
    offset_max: int
    tally: Tally | None
    lanes: tuple[tuple[Lane, Tally], ...] = ()
    in_flight: int = 0
    extra: int = 0


def sum_tallies(tallies: list[Tally]) -> Tally:
    """Return the tally of a queue for all lanes together, from the tallies of the lanes.

    It begins at the first start of a lane, and its count is the sum of their counts. Its end and
    its time estimate are those of the slowest lane. `tallies` must not be empty.
    """
    slowest = max(tallies, key=lambda tally: math.inf if tally.eta_s is None else tally.eta_s)
    first_start = min(tally.start for tally in tallies)
    return replace(slowest, start=first_start, count=sum(tally.count for tally in tallies))


def combined_eta_s(tallies: list[Tally]) -> float | None:
    """Return the time in seconds until the slowest queue has no lag.

    Return None if the time of a queue is unknown, and 0.0 if there are no tallies.
    """
    times_s = [tally.eta_s for tally in tallies]
    known_s = [time_s for time_s in times_s if time_s is not None]
    if len(known_s) < len(times_s):
        return None
    return max(known_s, default=0.0)


class MatchCounter:
    """Counts matching messages in the queues of one store.

    The methods that return `WorkItem` do their work in steps for `net.work.background`.
    """

    def __init__(self, store: Store) -> None:
        """Create a counter without tallies."""
        self._store = store
        self.properties = StoredProperties(store)
        self._tallies: dict[tuple[str, str, int], tuple[tuple[str, object], Tally]] = {}
        """By group, topic and queue id: the last tally, and the key of its criteria."""

    def count_lag(
        self,
        group: str,
        topic: str,
        queue_id: int,
        criteria: MatchCriteria,
        start: int,
        now_s: float,
    ) -> WorkItem[Tally]:
        """Count the matches from offset `start` to the end of a queue, and keep the tally.

        `start` is moved into the queue if it is outside. `now_s` is the monotonic time for the
        samples. If the last tally of `group` has the same criteria and the same messages, only the
        messages that the range has left behind and taken in are examined. Otherwise all are, and
        the samples begin again. The tally is not kept if messages were deleted meanwhile.
        """
        key = (group, topic, queue_id)
        offset_min, end = self._store.queue_offsets(topic, queue_id)
        start = min(max(start, offset_min), end)
        count = partial(self.count_range, topic, queue_id, criteria)
        known = self._find_valid_tally(key, criteria, offset_min)

        if known is not None and known.start <= start <= known.end <= end:
            # The group has moved on: the range has lost [known.start, start) and gained
            # [known.end, end). Count the shorter one of the parts before and after `start`.
            if start - known.start <= known.end - start:
                passed = yield from count(known.start, start)
            else:
                passed = known.count - (yield from count(start, known.end))
            arrived = yield from count(known.end, end)
            total = known.count - passed + arrived
            passed = known.passed_count + passed
            arrived = known.arrived_count + arrived
            samples = known.samples.copy()
        else:
            # The samples begin again, because the speed of the group is not known any more.
            if known is not None and start < known.start <= known.end <= end:
                # The offset of the group was reset to an earlier one.
                before = yield from count(start, known.start)
                total = before + known.count + (yield from count(known.end, end))
            else:
                total = yield from count(start, end)
            passed = 0
            arrived = 0
            samples = deque(maxlen=SAMPLES_KEPT)
        samples.append((now_s, passed, arrived))

        last_position = self._position_of(topic, queue_id, end - 1)
        tally = Tally(
            start=start,
            end=end,
            count=total,
            last_position=last_position,
            passed_count=passed,
            arrived_count=arrived,
            samples=samples,
        )
        # Retention may have deleted messages of the range while they were counted.
        is_deleted = self._store.queue_offsets(topic, queue_id)[0] > start
        if not is_deleted and (last_position >= 0 or start == end):
            self._tallies[key] = (criteria.key, tally)
            if len(self._tallies) > TALLIES_KEPT:
                del self._tallies[next(iter(self._tallies))]
        return tally

    def _find_valid_tally(
        self, key: tuple[str, str, int], criteria: MatchCriteria, offset_min: int
    ) -> Tally | None:
        """Return the last tally of (group, topic, queue id) if it is still right, else None.

        It is if it was counted with the same criteria, none of its messages were deleted (the
        queue begins at `offset_min`), and the topic was not deleted and created again.
        """
        criteria_key, tally = self._tallies.get(key, (None, None))
        if tally is None or criteria_key != criteria.key or tally.start < offset_min:
            return None
        _, topic, queue_id = key
        position = self._position_of(topic, queue_id, tally.end - 1)
        return tally if tally.last_position == position else None

    def count_lane_lag(
        self, name: str, topic: str, queue_id: int, lane_queue: LaneQueue, now_s: float
    ) -> WorkItem[Tally]:
        """Count the messages that a lane still has to receive in the queue of `lane_queue`.

        `name` is the name under which the tally is kept. The rule of a lane may change at some
        offsets of the queue. Only the messages under the last rule are counted from a kept tally.
        Those under earlier rules are counted again each time: after the lane has passed them, they
        are never counted again.
        """
        first, end = self._store.queue_offsets(topic, queue_id)
        start = rule_start = min(max(lane_queue.current_offset, first), end)
        earlier: list[tuple[int, int, LaneRule]] = []
        rule, rule_end = lane_queue.find_rule(rule_start)
        while rule_end is not None and rule_end < end:
            earlier.append((rule_start, rule_end, rule))
            rule_start = rule_end
            rule, rule_end = lane_queue.find_rule(rule_start)

        criteria = MatchCriteria.from_rule(rule)
        tally = yield from self.count_lag(name, topic, queue_id, criteria, rule_start, now_s)
        count = tally.count
        for low, high, earlier_rule in earlier:
            criteria = MatchCriteria.from_rule(earlier_rule)
            count += yield from self.count_range(topic, queue_id, criteria, low, high)
        return replace(tally, start=start, count=count)

    def _position_of(self, topic: str, queue_id: int, offset: int) -> int:
        """Return the log position of the message at `offset`, -1 if there is none."""
        units = self._store.reader.units(topic, queue_id, offset, 1) if offset >= 0 else b""
        return int(UNIT.unpack(units)[0]) if len(units) else -1

    def count_range(
        self, topic: str, queue_id: int, criteria: MatchCriteria, start: int, end: int
    ) -> WorkItem[int]:
        """Count the matches among the messages [`start`, `end`) of a queue.

        Nothing is read if the criteria match every message or none. Otherwise tags are compared
        (`_count_tags`), or blocks of columns evaluated, or records if there are no columns.
        """
        if start >= end or criteria.matches_nothing:
            return 0
        if criteria.matches_everything:
            return end - start
        if criteria.codes is not None:
            return (yield from self._count_tags(topic, queue_id, criteria, start, end))
        columns = self._store.columns
        if not columns.is_loaded:
            yield columns.warm_up
        assert criteria.vectorised is not None
        parts = columns.iter_parts(topic, queue_id, start, end, criteria.vectorised)
        if parts is None:
            return (yield from self._count_verdicts(topic, queue_id, criteria, start, end))
        total = 0
        while batch := list(islice(parts, BLOCKS_PER_JOB)):
            total += yield from self._count_batch(topic, queue_id, criteria, batch)
        return total

    def _count_batch(
        self, topic: str, queue_id: int, criteria: MatchCriteria, batch: "list[ColumnBlock | Load]"
    ) -> WorkItem[int]:
        """Count the matches in the blocks of `batch`, in one job.

        The job also loads the blocks that are not in memory. It runs on another thread if it loads
        a block or takes long. Where the columns cannot decide, records are evaluated afterwards.
        """
        vectorised = criteria.vectorised
        assert vectorised is not None
        counts: list[int | None] = []

        def job() -> None:
            """Append the count of each block; None where records have to be read.

            Runs on any thread.
            """
            for part in batch:
                block = part if isinstance(part, ColumnBlock) else part.run()
                if block is not None:
                    counts.append(vectorised.count(block))
                else:
                    is_passed = not isinstance(part, ColumnBlock) and part.has_no_match
                    counts.append(0 if is_passed else None)

        loads = [part for part in batch if not isinstance(part, ColumnBlock)]
        rows = sum(part.rows for part in batch if isinstance(part, ColumnBlock))
        if loads or not criteria.is_fast_for(rows):
            yield job
        else:
            job()
            yield None
        for load in loads:
            self._store.columns.accept_load(load)
        total = 0
        for part, count in zip(batch, counts, strict=True):
            if count is None:
                first = part.first_offset if isinstance(part, ColumnBlock) else part.start
                total += yield from self._count_verdicts(topic, queue_id, criteria, first, part.end)
            else:
                total += count
        return total

    def _count_verdicts(
        self, topic: str, queue_id: int, criteria: MatchCriteria, start: int, end: int
    ) -> WorkItem[int]:
        """Count the matches row by row, with records where columns cannot decide. Work item."""
        total = 0
        for step in self.iter_verdicts(topic, queue_id, criteria, start, end, only_matches=True):
            if callable(step):  # a job for another thread
                yield step
                continue
            if step is not None:
                total += step.verdicts.tobytes().count(TRUE)
            yield None
        return total

    def iter_verdicts(
        self,
        topic: str,
        queue_id: int,
        criteria: MatchCriteria,
        start: int,
        end: int,
        *,
        only_matches: bool = False,
    ) -> Iterator[Job | BlockVerdicts | None]:
        """Evaluate an SQL92 filter on the messages [`start`, `end`), in order.

        Yield three kinds of items. `BlockVerdicts` are the results for one block. A callable is a
        job: the caller must run it, usually on another thread, before it asks for the next item.
        None means that other work may run now. With `only_matches`, blocks without a match may be
        left out.
        """
        columns = self._store.columns
        if not columns.is_loaded:
            yield columns.warm_up
        pruning = criteria.vectorised if only_matches else None
        blocks = columns.iter_blocks(topic, queue_id, start, end, pruning)
        if blocks is None:
            import numpy as np  # noqa: PLC0415 - NumPy is loaded only for filters

            for low in range(start, end, RECORDS_PER_STEP):
                high = min(low + RECORDS_PER_STEP, end)
                verdicts = np.zeros(high - low, np.uint8)
                records = dict(self.properties.iter_range(topic, queue_id, low, high))
                rows = [offset - low for offset in records]
                yield from _judge_records(criteria, rows, list(records.values()), verdicts)
                yield BlockVerdicts(low, verdicts)
            return
        vectorised = criteria.vectorised
        assert vectorised is not None
        for block in blocks:
            judged: list[NDArray[np.uint8]] = []

            def judge(block: ColumnBlock = block) -> None:  # runs on any thread
                judged.append(vectorised.verdicts(block))  # noqa: B023 - runs before the next block

            if criteria.is_fast_for(block.rows):
                judge()
            else:
                yield judge
            verdicts = judged[0]
            if NEEDS_RECORD in verdicts:
                verdicts = verdicts.copy()
                undecided = iter((verdicts == NEEDS_RECORD).nonzero()[0].tolist())
                while rows := list(islice(undecided, RECORDS_PER_STEP)):
                    read_at = partial(self.properties.read_at, topic, queue_id)
                    properties = [read_at(block.first_offset + row) for row in rows]
                    yield from _judge_records(criteria, rows, properties, verdicts)
            yield BlockVerdicts(block.first_offset, verdicts)

    def _count_tags(
        self, topic: str, queue_id: int, criteria: MatchCriteria, start: int, end: int
    ) -> WorkItem[int]:
        """Count the messages among [`start`, `end`) whose tag is one of the wanted tags.

        The tag codes in the consume queue are compared first, in steps of TAG_UNITS units; the tags
        of the hits are read from columns or records.
        """
        from sluicemq.store import bulk  # noqa: PLC0415 - NumPy is loaded only for filters

        assert criteria.codes is not None
        columns = self._store.columns
        if end - start > TAG_UNITS and not columns.is_loaded:
            yield columns.warm_up
        total = 0
        while start < end:
            part = columns.find_available_part(topic, queue_id, start, end)
            stop = end if part is None else part.end
            units = self._store.reader.units(topic, queue_id, start, min(stop - start, TAG_UNITS))
            if not len(units):
                break
            hits = bulk.find_tag_codes(units, criteria.codes).tolist()
            if hits:
                total += yield from self._count_hits(criteria, bytes(units), hits, part)
            start += len(units) // UNIT_BYTES
            yield None
        return total

    def _count_hits(
        self,
        criteria: MatchCriteria,
        units: bytes,
        hits: list[int],
        part: "ColumnBlock | Load | None",
    ) -> WorkItem[int]:
        """Count the units in `hits` whose tag is one of the wanted tags.

        `units` are units of the queue, and `hits` the indices of those with a wanted tag code.
        `part` has the tags of all messages from the first of `units` on; None if there are no
        columns. If the columns cannot decide, the records of the hits are read.
        """
        block: ColumnBlock | None = None
        if isinstance(part, ColumnBlock):
            block = part
        elif part is not None:
            yield part.run
            self._store.columns.accept_load(part)
            block = None if part.block is None else part.block.slice_offsets(part.start, part.end)
        count = None if block is None else _count_rows(criteria, block, hits)
        if part is None and len(hits) >= RECORDS_PER_STEP:
            # Decode the hits as one block of columns. Fewer hits are read one by one below.
            begins = [hit * UNIT_BYTES for hit in hits]
            joined = b"".join([units[begin : begin + UNIT_BYTES] for begin in begins])
            if (decode := self._store.columns.make_block_builder(joined)) is not None:
                decoded: list[ColumnBlock] = []
                yield lambda: decoded.append(decode())
                count = _count_rows(criteria, decoded[0], range(len(hits)))
        if count is not None:
            return count

        total = 0
        remaining = iter(hits)
        while chunk := list(islice(remaining, RECORDS_PER_STEP)):
            total += sum(tag in criteria.tags for tag in self.properties.iter_tags(units, chunk))
            yield None
        return total


def _count_rows(criteria: MatchCriteria, block: "ColumnBlock", rows: Sequence[int]) -> int | None:
    """Return how many of `rows` of a block have a wanted tag; None if the columns cannot decide.

    They cannot if the block has odd rows, or too many distinct tags for a column.
    """
    import numpy as np  # noqa: PLC0415 - NumPy is loaded only for filters

    if len(block.odd) or TAGS in block.excluded:
        return None
    column = block.columns.get(TAGS)
    if column is None:
        return len(rows) if "" in criteria.tags else 0
    codes = [code for code, tag in enumerate(column.values) if tag in criteria.tags]
    if "" in criteria.tags:
        codes.append(-1)
    return int(np.isin(column.codes[np.array(rows, np.intp)], codes).sum())


def _judge_records(
    criteria: MatchCriteria,
    rows: list[int],
    properties: Sequence[Mapping[str, str] | None],
    verdicts: "NDArray[np.uint8]",
) -> Iterator[Job | None]:
    """Write the verdict on each of `rows` into `verdicts`, in steps.

    `properties` are those of the rows, None where there is no message; its verdict is FALSE. Yield
    None after each ROWS_PER_STEP, or one job for all rows if the expression is long.
    """
    verdict = criteria.verdict
    assert verdict is not None

    def judge(start: int, stop: int) -> None:
        """Write the verdicts on `rows[start:stop]`. Runs on any thread."""
        for row, values in zip(rows[start:stop], properties[start:stop], strict=True):
            verdicts[row] = FALSE if values is None else evaluate_verdict(verdict, values)

    if criteria.weight > INLINE_WEIGHT_MAX:
        yield partial(judge, 0, len(rows))
        return
    for start in range(0, len(rows), ROWS_PER_STEP):
        judge(start, start + ROWS_PER_STEP)
        yield None
