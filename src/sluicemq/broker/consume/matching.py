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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
        """Prepare reading from `store`. Nothing is read yet."""
        self._store = store

    def read_at(self, topic: str, queue_id: int, offset: int) -> dict[str, str] | None:
        """Return the properties of the message at `offset`; None if there is no message."""
        units = self._store.reader.units(topic, queue_id, offset, 1)
        if not len(units):
            return None
        position, size, _ = UNIT.unpack(units)
        return self._read_unit(position, size)

    def iter_range(
        self, topic: str, queue_id: int, start: int, end: int
    ) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield (offset, properties) of each message from offset `start` to before `end`.

        Deleted messages are skipped. Stop at the end of the queue.
        """
        step_start = start
        while step_start < end:
            unit_count = min(end - step_start, RECORDS_PER_STEP)
            units = self._store.reader.units(topic, queue_id, step_start, unit_count)
            if not len(units):
                return
            for offset, (position, size, _) in enumerate(UNIT.iter_unpack(units), step_start):
                properties = self._read_unit(position, size)
                if properties is not None:
                    yield offset, properties
            step_start += len(units) // UNIT_BYTES

    def iter_tags(self, units: memoryview | bytearray | bytes, hits: list[int]) -> Iterator[str]:
        """Yield the tags of some messages of a queue; "" for a message without a tag.

        `units` are the bytes of consecutive units, the 20-byte entries of a consume queue. `hits`
        are the indices of the units whose messages are read.
        """
        for index in hits:
            position, size, _ = UNIT.unpack_from(units, index * UNIT_BYTES)
            properties = self._read_unit(position, size)
            if properties is None:
                yield ""
            else:
                yield properties.get(TAGS, "")

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
        """Compile the filter of `subscription`. The expression `*` matches every message.

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

    @classmethod
    def without_samples(cls, start: int, end: int, count: int) -> "Tally":
        """Return the first tally, a number of matches, of the offsets from `start` to before `end`.

        Its `last_position` is -1 until the caller sets it.
        """
        return cls(
            start=start,
            end=end,
            count=count,
            last_position=-1,
            passed_count=0,
            arrived_count=0,
            samples=deque(maxlen=SAMPLES_KEPT),
        )

    @property
    def eta_s(self) -> float | None:
        """The estimated time in seconds until the group has no unread matching messages.

        The samples give the speed at which their number falls. The time is 0.0 if there are none.
        It is None if the number does not fall, or if there is only one sample.
        """
        if not self.count:
            return 0.0
        first_s, first_passed, first_arrived = self.samples[0]
        last_s, *_ = self.samples[-1]
        passed = self.passed_count - first_passed
        arrived = self.arrived_count - first_arrived
        drained = passed - arrived
        # The time is the number divided by the speed, which is `drained` per `last_s - first_s`.
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


LagSamples = deque[tuple[float, tuple[int, ...]]]
"""Counts of the lag of a group on a topic: the monotonic time, and the lag in each queue."""


def estimate_eta_s(samples: LagSamples) -> float | None:
    """Return the time in seconds until no queue has a lag, by the speed at which the lags fall.

    Return None if the lag of a queue does not fall, or if there is only one sample. `samples` must
    not be empty, and must have the same number of queues.
    """
    first_s, first_lags = samples[0]
    last_s, last_lags = samples[-1]
    longest_s = 0.0
    for first_lag, lag in zip(first_lags, last_lags, strict=True):
        if not lag:
            continue
        drained = first_lag - lag
        if drained <= 0:
            return None
        longest_s = max(longest_s, lag * (last_s - first_s) / drained)
    return longest_s


def _move_tally(
    last_tally: Tally, start: int, end: int, count_part: Callable[[int, int], WorkItem[int]]
) -> WorkItem[Tally]:
    """Return the tally of the offsets from `start` to before `end`, based on an earlier tally.

    Since `last_tally`, the range has lost the offsets from `last_tally.start` to `start`, and has
    gained those from `last_tally.end` to `end`. Only these are counted, by `count_part(part_start,
    part_end)`. This is a generator that works in steps.
    """
    # `start` divides the old range into two parts. Count the shorter one.
    if start - last_tally.start <= last_tally.end - start:
        passed_count = yield from count_part(last_tally.start, start)
    else:
        remaining_count = yield from count_part(start, last_tally.end)
        passed_count = last_tally.count - remaining_count
    arrived_count = yield from count_part(last_tally.end, end)
    return replace(
        last_tally,
        start=start,
        end=end,
        count=last_tally.count - passed_count + arrived_count,
        passed_count=last_tally.passed_count + passed_count,
        arrived_count=last_tally.arrived_count + arrived_count,
        samples=last_tally.samples.copy(),
    )


class MatchCounter:
    """Counts matching messages in the queues of one store.

    The methods that return `WorkItem` do their work in steps for `net.work.background`.
    """

    def __init__(self, store: Store) -> None:
        """Create a counter of matching messages, without earlier results."""
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
        """Count the messages from offset `start` to the end of a queue that match `criteria`.

        Return the result as a Tally, which is also kept for the next call. If the last tally of the
        group is still valid, only the messages that have been added to the range or removed from it
        are examined. Otherwise all are examined, and the samples for the time estimate begin again.
        `start` is moved into the queue if it is outside. `now_s` is the monotonic time. The tally
        is not kept if messages were deleted meanwhile. This is a generator that works in steps.
        """
        key = (group, topic, queue_id)
        offset_min, end = self._store.queue_offsets(topic, queue_id)
        start = min(max(start, offset_min), end)
        count_part = partial(self.count_range, topic, queue_id, criteria)

        last_tally = self._find_valid_tally(key, criteria, offset_min)
        if last_tally is not None and last_tally.start <= start <= last_tally.end <= end:
            tally = yield from _move_tally(last_tally, start, end, count_part)
        elif last_tally is not None and start < last_tally.start <= last_tally.end <= end:
            # The offset of the group was reset to an earlier one.
            count_before = yield from count_part(start, last_tally.start)
            count_behind = yield from count_part(last_tally.end, end)
            match_count = count_before + last_tally.count + count_behind
            tally = Tally.without_samples(start, end, match_count)
        else:
            match_count = yield from count_part(start, end)
            tally = Tally.without_samples(start, end, match_count)

        last_position = self._find_position(topic, queue_id, end - 1)
        tally = replace(tally, last_position=last_position)
        tally.samples.append((now_s, tally.passed_count, tally.arrived_count))

        # Retention may have deleted messages of the range while they were counted.
        is_deleted = self._store.queue_offsets(topic, queue_id)[0] > start
        if not is_deleted and (last_position >= 0 or start == end):
            self._tallies[key] = (criteria.key, tally)
            if len(self._tallies) > TALLIES_KEPT:
                oldest_key = next(iter(self._tallies))
                del self._tallies[oldest_key]
        return tally

    def _find_valid_tally(
        self, key: tuple[str, str, int], criteria: MatchCriteria, offset_min: int
    ) -> Tally | None:
        """Return the last tally of `key` (group, topic, queue id) if it is still valid, else None.

        It is valid if it was counted with the same criteria, if none of its messages were deleted
        (the queue begins at `offset_min` now), and if the topic was not deleted and created again.
        """
        criteria_key, tally = self._tallies.get(key, (None, None))
        if tally is None or criteria_key != criteria.key or tally.start < offset_min:
            return None
        _, topic, queue_id = key
        last_position = self._find_position(topic, queue_id, tally.end - 1)
        if last_position != tally.last_position:
            return None
        return tally

    def count_lane_lag(
        self, name: str, topic: str, queue_id: int, lane_queue: LaneQueue, now_s: float
    ) -> WorkItem[Tally]:
        """Count the messages that a lane still has to receive in the queue of `lane_queue`.

        `name` is the name under which the tally is kept. The rule of a lane, which says which
        messages are its own, may change at some offsets of the queue. The messages under the last
        rule are counted with the help of the last tally. Those under earlier rules are all counted
        in each call, until the lane has passed them. This is a generator that works in steps.
        """
        offset_min, end = self._store.queue_offsets(topic, queue_id)
        start = min(max(lane_queue.current_offset, offset_min), end)

        *earlier_ranges, last_range = _list_rule_ranges(lane_queue, start, end)

        criteria = MatchCriteria.from_rule(last_range.rule)
        tally = yield from self.count_lag(name, topic, queue_id, criteria, last_range.start, now_s)
        match_count = tally.count
        for earlier in earlier_ranges:
            criteria = MatchCriteria.from_rule(earlier.rule)
            match_count += yield from self.count_range(
                topic, queue_id, criteria, earlier.start, earlier.end
            )
        return replace(tally, start=start, count=match_count)

    def _find_position(self, topic: str, queue_id: int, offset: int) -> int:
        """Return the log position of the message at `offset`, -1 if there is none."""
        if offset < 0:
            return -1
        units = self._store.reader.units(topic, queue_id, offset, 1)
        if not len(units):
            return -1
        position, _, _ = UNIT.unpack(units)
        return int(position)

    def count_range(
        self, topic: str, queue_id: int, criteria: MatchCriteria, start: int, end: int
    ) -> WorkItem[int]:
        """Count the messages of a queue from `start` to before `end` that match `criteria`.

        Nothing is read if the criteria match every message or none. A filter by tags compares tag
        codes and tags. Any other filter is evaluated on blocks of columns (the values of a property
        of many messages), or on records if there are no columns. This is a generator that works in
        steps.
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
        blocks = columns.iter_parts(topic, queue_id, start, end, criteria.vectorised)
        if blocks is None:
            return (yield from self._count_verdicts(topic, queue_id, criteria, start, end))

        match_count = 0
        while batch := list(islice(blocks, BLOCKS_PER_JOB)):
            match_count += yield from self._count_batch(topic, queue_id, criteria, batch)
        return match_count

    def _count_batch(
        self, topic: str, queue_id: int, criteria: MatchCriteria, batch: "list[ColumnBlock | Load]"
    ) -> WorkItem[int]:
        """Count the matches in a few blocks of columns, in one function.

        It runs on another thread if a block must be loaded or if it takes long. If the columns of a
        block cannot decide, its records are evaluated afterwards. This is a generator that works in
        steps.
        """
        vectorised = criteria.vectorised
        assert vectorised is not None
        counts: list[int | None] = []

        def count_blocks() -> None:
            """Append the count of each block; None where records have to be read.

            Runs on any thread.
            """
            counts.extend(_count_block(vectorised, block_or_load) for block_or_load in batch)

        blocks = [block for block in batch if isinstance(block, ColumnBlock)]
        loads = [load for load in batch if not isinstance(load, ColumnBlock)]
        is_fast = criteria.is_fast_for(sum(block.rows for block in blocks))
        if is_fast and not loads:
            count_blocks()
            yield None
        else:
            yield count_blocks
        for load in loads:
            self._store.columns.accept_load(load)

        # Where the columns could not decide, evaluate records.
        match_count = 0
        for block_or_load, block_count in zip(batch, counts, strict=True):
            if block_count is not None:
                match_count += block_count
                continue
            if isinstance(block_or_load, ColumnBlock):
                start = block_or_load.first_offset
            else:
                start = block_or_load.start
            match_count += yield from self._count_verdicts(
                topic, queue_id, criteria, start, block_or_load.end
            )
        return match_count

    def _count_verdicts(
        self, topic: str, queue_id: int, criteria: MatchCriteria, start: int, end: int
    ) -> WorkItem[int]:
        """Count the messages from `start` to before `end` that match, by evaluating each of them.

        Records are read where columns cannot decide. This is a generator that works in steps.
        """
        match_count = 0
        for step in self.iter_verdicts(topic, queue_id, criteria, start, end, only_matches=True):
            if callable(step):  # a job for another thread
                yield step
                continue
            if step is not None:
                # The array has one byte for each message.
                match_count += step.verdicts.tobytes().count(TRUE)
            yield None
        return match_count

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
        """Evaluate a filter on the messages from offset `start` to before `end`, in order.

        Yield three kinds of items. `BlockVerdicts` are the results for one block of messages. A
        function must be called by the caller, usually on another thread, before the next item is
        requested. None means that other work may run now. With `only_matches`, blocks without a
        match may be left out.
        """
        columns = self._store.columns
        if not columns.is_loaded:
            yield columns.warm_up
        pruning = criteria.vectorised if only_matches else None
        blocks = columns.iter_blocks(topic, queue_id, start, end, pruning)
        if blocks is None:
            yield from self._iter_verdicts_of_records(topic, queue_id, criteria, start, end)
            return

        read_at = partial(self.properties.read_at, topic, queue_id)
        for block in blocks:
            verdicts = yield from _judge_block(criteria, block)
            if NEEDS_RECORD in verdicts:
                verdicts = verdicts.copy()
                undecided_rows = iter((verdicts == NEEDS_RECORD).nonzero()[0].tolist())
                while rows := list(islice(undecided_rows, RECORDS_PER_STEP)):
                    properties = [read_at(block.first_offset + row) for row in rows]
                    yield from _judge_records(criteria, rows, properties, verdicts)
            yield BlockVerdicts(block.first_offset, verdicts)

    def _iter_verdicts_of_records(
        self, topic: str, queue_id: int, criteria: MatchCriteria, start: int, end: int
    ) -> Iterator[Job | BlockVerdicts | None]:
        """Evaluate a filter on the records from offset `start` to before `end`, without columns.

        The items are those of `iter_verdicts`.
        """
        import numpy as np  # noqa: PLC0415 - NumPy is loaded only for filters

        for step_start in range(start, end, RECORDS_PER_STEP):
            step_end = min(step_start + RECORDS_PER_STEP, end)
            # A message that does not exist keeps the verdict FALSE, which is 0.
            verdicts = np.zeros(step_end - step_start, np.uint8)
            records = dict(self.properties.iter_range(topic, queue_id, step_start, step_end))
            rows = [offset - step_start for offset in records]
            yield from _judge_records(criteria, rows, list(records.values()), verdicts)
            yield BlockVerdicts(step_start, verdicts)

    def _count_tags(
        self, topic: str, queue_id: int, criteria: MatchCriteria, start: int, end: int
    ) -> WorkItem[int]:
        """Count the messages from `start` to before `end` whose tag is one of the wanted tags.

        First the tag codes (hash codes of tags) in the consume queue are compared, in steps of
        TAG_UNITS messages. Different tags may have the same code, so the tags of the messages with
        a wanted code are then read from columns or records.
        """
        from sluicemq.store import bulk  # noqa: PLC0415 - NumPy is loaded only for filters

        assert criteria.codes is not None
        columns = self._store.columns
        if end - start > TAG_UNITS and not columns.is_loaded:
            yield columns.warm_up
        match_count = 0
        while start < end:
            tag_source = columns.find_available_part(topic, queue_id, start, end)
            source_end = end if tag_source is None else tag_source.end
            unit_count = min(source_end - start, TAG_UNITS)
            units = self._store.reader.units(topic, queue_id, start, unit_count)
            if not len(units):
                break
            hits = bulk.find_tag_codes(units, criteria.codes).tolist()
            if hits:
                match_count += yield from self._count_hits(criteria, bytes(units), hits, tag_source)
            start += len(units) // UNIT_BYTES
            yield None
        return match_count

    def _count_hits(
        self,
        criteria: MatchCriteria,
        units: bytes,
        hits: list[int],
        tag_source: "ColumnBlock | Load | None",
    ) -> WorkItem[int]:
        """Count the messages with a wanted tag code that really have a wanted tag.

        `units` are entries of the queue, and `hits` the indices of those with a wanted tag code.
        `tag_source` has the tags of all messages from the first of `units` on; None means that
        there are no columns. If the columns cannot decide, the records of the hits are read.
        """
        match_count: int | None = None
        if isinstance(tag_source, ColumnBlock):
            match_count = _count_rows(criteria, tag_source, hits)
        elif tag_source is not None:
            yield tag_source.run
            self._store.columns.accept_load(tag_source)
            if tag_source.block is not None:
                block = tag_source.block.slice_offsets(tag_source.start, tag_source.end)
                match_count = _count_rows(criteria, block, hits)
        elif len(hits) >= RECORDS_PER_STEP:
            match_count = yield from self._count_decoded_hits(criteria, units, hits)
        if match_count is not None:
            return match_count

        # Read the hits one by one.
        match_count = 0
        remaining_hits = iter(hits)
        while step_hits := list(islice(remaining_hits, RECORDS_PER_STEP)):
            for tag in self.properties.iter_tags(units, step_hits):
                if tag in criteria.tags:
                    match_count += 1
            yield None
        return match_count

    def _count_decoded_hits(
        self, criteria: MatchCriteria, units: bytes, hits: list[int]
    ) -> WorkItem[int | None]:
        """Count the messages in `hits` with a wanted tag, by decoding them as one block of columns.

        `units` are entries of the queue, and `hits` are indices of them. Return None if they cannot
        be decoded, or if the columns cannot decide. This is a generator that works in steps.
        """
        hit_starts = [hit * UNIT_BYTES for hit in hits]
        hit_units = b"".join([units[start : start + UNIT_BYTES] for start in hit_starts])
        build_block = self._store.columns.make_block_builder(hit_units)
        if build_block is None:
            return None
        built_blocks: list[ColumnBlock] = []
        yield lambda: built_blocks.append(build_block())
        return _count_rows(criteria, built_blocks[0], range(len(hits)))


class _RuleRange(NamedTuple):
    """The offsets [start, end) of a queue for which a lane has the same rule."""

    start: int
    end: int
    rule: LaneRule


def _list_rule_ranges(lane_queue: LaneQueue, start: int, end: int) -> list[_RuleRange]:
    """Divide the offsets from `start` to `end` into ranges in which the lane has the same rule.

    The result has at least one range, which may be empty.
    """
    ranges: list[_RuleRange] = []
    rule_start = start
    rule, rule_end = lane_queue.find_rule(rule_start)
    while rule_end is not None and rule_end < end:
        ranges.append(_RuleRange(rule_start, rule_end, rule))
        rule_start = rule_end
        rule, rule_end = lane_queue.find_rule(rule_start)
    ranges.append(_RuleRange(rule_start, end, rule))
    return ranges


def _count_block(
    vectorised: Vectorised | RuleColumnFilter, block_or_load: "ColumnBlock | Load"
) -> int | None:
    """Return the number of matches in a block; None if its records have to be read.

    A block that is not in memory is loaded. Called on any thread.
    """
    if isinstance(block_or_load, ColumnBlock):
        return vectorised.count(block_or_load)
    block = block_or_load.run()
    if block is not None:
        return vectorised.count(block)
    return 0 if block_or_load.has_no_match else None


def _judge_block(
    criteria: MatchCriteria, block: ColumnBlock
) -> "Generator[Job | None, Any, NDArray[np.uint8]]":
    """Evaluate an SQL92 filter on a block of columns, and return the verdict on each message.

    A verdict is TRUE, FALSE, or NEEDS_RECORD if the columns cannot decide. If the evaluation takes
    long, yield one function that does it on another thread.
    """
    vectorised = criteria.vectorised
    assert vectorised is not None
    if criteria.is_fast_for(block.rows):
        return vectorised.verdicts(block)
    judged: list[NDArray[np.uint8]] = []
    yield lambda: judged.append(vectorised.verdicts(block))
    return judged[0]


def _count_rows(criteria: MatchCriteria, block: "ColumnBlock", rows: Sequence[int]) -> int | None:
    """Return how many of the given rows of a block have a wanted tag, or None if it is unknown.

    It is unknown if the block has rows that only their records can decide (`odd`), or has no column
    of tags because there are too many distinct ones.
    """
    import numpy as np  # noqa: PLC0415 - NumPy is loaded only for filters

    if len(block.odd) or TAGS in block.excluded:
        return None
    wants_untagged = "" in criteria.tags
    column = block.columns.get(TAGS)
    if column is None:  # no message of the block has a tag
        return len(rows) if wants_untagged else 0
    # A code of a column is the index of a value in `column.values`, or -1 without a value.
    wanted_codes = [code for code, tag in enumerate(column.values) if tag in criteria.tags]
    if wants_untagged:
        wanted_codes.append(-1)
    codes = column.codes[np.array(rows, np.intp)]
    return int(np.isin(codes, wanted_codes).sum())


def _judge_records(
    criteria: MatchCriteria,
    rows: list[int],
    properties: Sequence[Mapping[str, str] | None],
    verdicts: "NDArray[np.uint8]",
) -> Iterator[Job | None]:
    """Evaluate a filter on some rows, and write the results into `verdicts`, in steps.

    `properties` has the properties of the message of each row, or None if there is no message. Then
    the result is FALSE. Yield None after each ROWS_PER_STEP rows. If the expression is long, yield
    one function that does all rows on another thread.
    """
    evaluate = criteria.verdict
    assert evaluate is not None

    def judge(start: int, stop: int) -> None:
        """Write the verdicts on `rows[start:stop]`. Runs on any thread."""
        for row, row_properties in zip(rows[start:stop], properties[start:stop], strict=True):
            if row_properties is None:
                verdicts[row] = FALSE
            else:
                verdicts[row] = evaluate_verdict(evaluate, row_properties)

    if criteria.weight > INLINE_WEIGHT_MAX:
        yield partial(judge, 0, len(rows))
        return
    for start in range(0, len(rows), ROWS_PER_STEP):
        judge(start, start + ROWS_PER_STEP)
        yield None
