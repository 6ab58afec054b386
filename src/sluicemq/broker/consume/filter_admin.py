"""What tools ask about filters and lanes: 900131 exact lag and counters, 900132 an expression on
trial, 900133 a group's contract and lanes. Ours alone.

The first two look at many messages and answer when they are done (`background.py`). A trial looks
at no more than the asker allows, the newest messages of each queue.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson

from sluicemq.broker.background import Background, Job, Steps
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.filter_watch import FilterWatch, QueueMatches, Troubles
from sluicemq.broker.consume.matching import RECORDS_A_STEP
from sluicemq.broker.lanes.rules import atoms_of
from sluicemq.broker.lanes.table import show, shown
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.topics import Groups, Topics
from sluicemq.errors import FilterError, RequestError
from sluicemq.filter.subscriptions import preparation, subscribe
from sluicemq.model.subscription import TAG, Subscription
from sluicemq.net.dispatch import Peer
from sluicemq.store.gather import WEIGHT_INLINE
from sluicemq.store.store import Store
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import ConsumerGroupRequest, FilteredLagRequest, TryFilterRequest

if TYPE_CHECKING:
    from sluicemq.filter.lab import Report, Sample, Trial

ROWS_MAX: Final = 1_000_000
ROWS_A_STEP: Final = 8192
ROWS_A_JOB: Final = 1024
Range = tuple[int, int, int]
"""Queue id, first offset, end."""


@dataclass(slots=True, eq=False)
class FilterAdmin:
    """The request family of filters and lanes."""

    topics: Topics
    groups: Groups
    offsets: Offsets
    consumers: Consumers
    watch: FilterWatch
    background: Background
    store: Store

    # --- exact lag

    def lag(self, header: FilteredLagRequest, command: Command, peer: Peer) -> Command | None:
        """900131: ours."""
        self.groups.check(header.group)
        return self.background.answer(self._lag(header), command, peer)

    def _lag(self, header: FilteredLagRequest) -> Steps[Command]:
        group = header.group
        names = self.watch.topics_of(group) | self.offsets.topics_of(group)
        topics = [header.topic] if header.topic else sorted(names)
        found = []
        for topic in topics:
            if topic not in self.topics:
                continue
            subscription = self.watch.subscription(group, topic)
            if header.expression is not None:
                yield from preparation(header.expression, header.kind or TAG)
                subscription = _parsed(topic, header.expression, header.kind)
            yield from self.watch.look(group, topic)
            if header.expression is None:
                queues = yield from self.watch.progress(group, topic)
            else:
                queues = yield from self.watch.lag(group, topic, subscription)
            found.append(self._matching(group, topic, subscription, queues))
        return Command(ResponseCode.SUCCESS, {}, bodies.encode_group_matching(found))

    def _matching(
        self, group: str, topic: str, wanted: Subscription | None, queues: list[QueueMatches]
    ) -> bodies.GroupMatching:
        delivered = self.watch.delivered.get((topic, group))
        troubles = self.watch.troubles.get((topic, group)) or Troubles()
        return bodies.GroupMatching(
            topic,
            wanted.kind if wanted is not None else "",
            wanted.expression if wanted is not None else None,
            tuple(_queue_matching(queue) for queue in queues),
            delivered.messages_out if delivered is not None else 0,
            delivered.filtered if delivered is not None else 0,
            troubles.reasons,
            tuple(bodies.FilterFailure(*sample) for sample in troubles.samples),
            tuple(_lanes(topic, queues)),
        )

    # --- an expression on trial

    def try_filter(self, header: TryFilterRequest, command: Command, peer: Peer) -> Command | None:
        """900132: ours."""
        topic = self.topics.known(header.topic)
        against = None
        if header.group is not None:
            against = self.watch.subscription(header.group, header.topic)
            if against is None:
                raise RequestError(
                    ResponseCode.SUBSCRIPTION_NOT_EXIST,
                    f"what the group {header.group} wants of {header.topic} is not known: no "
                    "member is online, and no SQL92 expression is kept of it.",
                )
        ranges = list(self._ranges(header, topic.config.read_queues))
        steps = self._try(header, against, ranges)
        return self.background.answer(steps, command, peer)

    def _ranges(self, header: TryFilterRequest, queues: int) -> Iterator[Range]:
        for queue_id in range(queues):
            low, high = self.store.queue_offsets(header.topic, queue_id)
            if header.begin_ms:
                low = self.store.reader.offset_by_time(header.topic, queue_id, header.begin_ms)
            if header.end_ms is not None:
                high = self.store.reader.offset_by_time(header.topic, queue_id, header.end_ms + 1)
            if low < high:
                yield queue_id, low, high

    def _try(
        self,
        header: TryFilterRequest,
        against: Subscription | None,
        ranges: list[Range],
    ) -> Steps[Command]:
        topic, rows_max = header.topic, header.count_max or ROWS_MAX
        yield from preparation(header.expression, header.kind or TAG)
        wanted = _parsed(topic, header.expression, header.kind)
        stored = sum(end - start for _, start, end in ranges)
        if not self.store.columns.is_warm:
            yield self.store.columns.warm_up
        from sluicemq.filter.lab import Trial  # noqa: PLC0415 - NumPy only when somebody asks

        trial = yield partial(Trial, wanted, against)
        weight = len(wanted.expression) + (0 if against is None else len(against.expression))
        for queue_id, start, end in ranges:
            if stored > rows_max:
                start = end - max((end - start) * rows_max // stored, 1)  # noqa: PLW2901
            yield from self._try_queue(trial, weight, topic, queue_id, start, end)
        report = yield trial.report
        at = self.watch.matching.records.at
        places = sorted({(str(sample.source), sample.offset) for sample in _samples(report)})
        body = {
            "report": report,
            "stored": stored,
            "messages": [
                {
                    "queueId": int(source),
                    "queueOffset": offset,
                    "properties": at(topic, int(source), offset) or {},
                }
                for source, offset in places
            ],
        }
        data = yield partial(orjson.dumps, body, default=str)
        return Command(ResponseCode.SUCCESS, {}, data)

    def _try_queue(
        self, trial: "Trial", weight: int, topic: str, queue_id: int, start: int, end: int
    ) -> Iterator[Job | None]:
        records = self.watch.matching.records
        blocks = self.store.columns.blocks(topic, queue_id, start, end)
        if blocks is None or weight > WEIGHT_INLINE:  # each condition is counted by itself
            for first in range(start, end, ROWS_A_JOB):
                rows: list[dict[str, str]] = []
                for low in range(first, min(first + ROWS_A_JOB, end), RECORDS_A_STEP):
                    found = records.between(topic, queue_id, low, min(low + RECORDS_A_STEP, end))
                    rows += [row for _, row in found]
                    yield None
                yield partial(trial.add_rows, rows, first_offset=first, source=queue_id)
            return
        for block in blocks:
            for low in range(block.first_offset, block.end, ROWS_A_STEP):
                part = block.part(low, min(low + ROWS_A_STEP, block.end))

                def properties_of(row: int, first: int = low) -> Mapping[str, str]:
                    return records.at(topic, queue_id, first + row) or {}

                trial.add(part, queue_id, properties_of)
                yield None

    def lanes(self, header: ConsumerGroupRequest, command: Command, peer: Peer) -> Command:
        """900133: ours. A group's contract, its lanes and whom it refused."""
        name = header.group
        self.groups.check(name)
        contracts = self.consumers.contracts
        made = self.consumers.lanes.table.get(name)
        answer = {
            "conflicts": contracts.conflicts.get(name, 0),
            "contract": contracts.of(name),
            "forgotten": list(made.forgotten) if made is not None else [],
            "lanes": show(made) if made is not None else [],
            "refused": {c: said.why for (g, c), said in contracts.refused.items() if g == name},
            "unmatched": made.unmatched if made is not None else 0,
        }
        return Command(ResponseCode.SUCCESS, body=orjson.dumps(answer))


def _samples(report: "Report") -> Iterator["Sample"]:
    yield from report.samples
    for cause in report.causes:
        yield cause.sample
    if report.difference is not None:
        yield from report.difference.samples_here
        yield from report.difference.samples_there


def _parsed(topic: str, expression: str, kind: str | None) -> Subscription:
    try:
        return subscribe(topic, expression, kind or None)
    except FilterError as error:
        raise RequestError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from error


def _lanes(topic: str, queues: list[QueueMatches]) -> Iterator[bodies.LaneMatching]:
    """What each lane still has to get, the oldest lane first."""
    lanes = {item.lane.key: item.lane for queue in queues for item in queue.lanes}
    for lane in sorted(lanes.values(), key=lambda lane: (lane.is_idle, lane.number)):
        kind, expression = shown(atoms_of(lane.key).get(topic, ()))
        own = [(queue, item) for queue in queues for item in queue.lanes if item.lane is lane]
        yield bodies.LaneMatching(
            lane.id,
            kind,
            expression,
            tuple(sorted(lane.members)),
            tuple(
                _queue_matching(queue._replace(committed=item.tally.start, tally=item.tally))
                for queue, item in own
            ),
        )


def _queue_matching(queue: QueueMatches) -> bodies.QueueMatching:
    tally = queue.tally
    eta_s = tally.eta_s if tally is not None else None
    return bodies.QueueMatching(
        queue.queue_id,
        queue.committed,
        queue.offset_min,
        queue.offset_max,
        tally.count if tally is not None else None,
        None if eta_s is None else round(eta_s * 1000),
    )
