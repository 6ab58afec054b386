"""What filters do to a group, and would do: exact lag, counters, an expression on trial.

Conversations as in `operations`. A SluiceMQ broker counts by itself (900131, 900132). A RocketMQ
broker cannot know how many messages match (its lag counts those that the filter will drop): that is
said, as None. A trial on one reads the messages here, the newest of each queue.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from sluicemq.client.core import requests
from sluicemq.client.core.answers import (
    GROUP_NOT_EXIST,
    SUBSCRIPTION_NOT_EXIST,
    SUBSCRIPTION_PARSE_FAILED,
    SUCCESS,
    TOPIC_NOT_EXIST,
    PullStatus,
    expect_success,
    pull_answer,
)
from sluicemq.client.core.operations import topics as operations
from sluicemq.client.core.operations.topics import (
    Ask,
    LaneLag,
    QueueLag,
    RouteOf,
    Talk,
    masters,
    offset_by_time,
    offset_max,
    offset_min,
    queues,
)
from sluicemq.errors import ConfigurationError, FilterSyntaxError, install_extra
from sluicemq.filter.check import check_subscription
from sluicemq.filter.subscriptions import subscribe
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MASTER_ID, MessageQueue, TopicRoute
from sluicemq.record.codec import decode_records
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

UNSUPPORTED: Final = int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
ROWS_MAX: Final = 1_000_000
PULLED_MAX: Final = 100_000
"""So many messages are read from a RocketMQ broker for a trial, unless more are asked for."""
_READ_GROUP: Final = "TOOLS_CONSUMER"
_PAGE: Final = 1024
Progress = Callable[[int, int], None]
"""Told how many messages were read, of how many."""


@dataclass(frozen=True, slots=True)
class TopicMatching:
    """What the filter of a group does on one topic of one broker. `is_known` is False on a RocketMQ
    broker, which does not count."""

    broker: str
    is_known: bool
    topics: tuple[bodies.GroupMatching, ...] = ()

    def of(self, queue: MessageQueue) -> tuple[bodies.GroupMatching, bodies.QueueMatching] | None:
        """What it says of one queue."""
        for topic in self.topics if queue.broker == self.broker else ():
            for item in topic.queues if topic.topic == queue.topic else ():
                if item.queue_id == queue.queue_id:
                    return topic, item
        return None


def matching(
    group: str, topic: str | None = None, subscription: Subscription | None = None
) -> Talk[list[TopicMatching]]:
    """What each broker says; with a subscription, as if the group had that one."""
    found = []
    for broker, address in (yield from masters()).items():
        command = requests.filtered_lag(group, topic, subscription)
        answer = yield Ask(address, command, must_succeed=False)
        if answer.code == SUCCESS:
            told = tuple(bodies.decode_group_matching(answer.body))
            found.append(TopicMatching(broker, True, told))
        elif answer.code in (GROUP_NOT_EXIST, TOPIC_NOT_EXIST):
            found.append(TopicMatching(broker, True))
        elif answer.code == UNSUPPORTED:
            found.append(TopicMatching(broker, False))
        else:
            expect_success(answer, address)
    return found


def lag(name: str | None = None) -> Talk[list[QueueLag]]:
    """Of one group, or of all, with what of it the groups' filters let through. Raises
    ConfigurationError for a group that no broker knows."""
    found = []
    told: dict[str, list[TopicMatching]] = {}
    for item in (yield from operations.lag(name)):
        if item.group not in told:
            told[item.group] = yield from matching(item.group)
        for broker in told[item.group]:
            if known := broker.of(item.queue):
                item = _with_matching(item, *known)  # noqa: PLW2901
        found.append(item)
    return found


def _with_matching(
    item: QueueLag, topic: bodies.GroupMatching, known: bodies.QueueMatching
) -> QueueLag:
    """Offsets and count of one moment."""
    return replace(
        item,
        committed=max(known.committed, 0),
        offset_min=known.offset_min,
        offset_max=known.offset_max,
        matching=known.matching,
        eta_ms=known.eta_ms,
        lanes=tuple(
            LaneLag(lane.lane, lane.expression, one.committed, one.offset_max, one.matching)
            for lane in topic.lanes
            for one in lane.queues
            if one.queue_id == known.queue_id
        ),
    )


# ------------------------------------------------------------------------------------- trials


@dataclass(frozen=True, slots=True)
class BrokerTrial:
    """An expression tried on one broker: `report` is `filter.lab.Report` as a mapping, with the
    match rate and each condition's selectivity. Samples name a queue and an offset; `messages` are
    their properties by both. `stored`: messages in that time, of which `rows` were looked at."""

    broker: str
    stored: int
    report: Mapping[str, Any]
    messages: Mapping[tuple[int, int], Mapping[str, str]]
    is_read_here: bool = False

    @property
    def rows(self) -> int:
        return int(self.report["rows"])


def try_filter(
    topic: str,
    expression: str,
    kind: str | None = None,
    *,
    begin_ms: int | None = None,
    end_ms: int | None = None,
    group: str | None = None,
    count_max: int | None = None,
    progress: Progress | None = None,
) -> Talk[list[BrokerTrial]]:
    """What an expression would do, on each broker of a topic. Raises FilterSyntaxError,
    ConfigurationError when it is not known what the group wants, RouteNotFoundError."""
    wanted = subscribe(topic, expression, kind)
    check_subscription(wanted)
    route: TopicRoute = yield RouteOf(topic)
    found = []
    for data in route.brokers:
        address = data.addresses.get(MASTER_ID)
        if address is None:
            continue
        command = requests.try_filter(wanted, group, begin_ms, end_ms, count_max or ROWS_MAX)
        answer = yield Ask(address, command, must_succeed=False)
        if answer.code == UNSUPPORTED:
            limits = (begin_ms or 0, end_ms, count_max or PULLED_MAX)
            against = yield from _subscription_of(group, topic, address) if group else _nothing()
            read = yield from _try_here(wanted, against, data.broker, limits, progress)
            found.append(read)
        else:
            found.append(_trial_of(data.broker, answer, address))
    return found


def _nothing() -> Talk[None]:
    return
    yield


def _trial_of(broker: str, answer: Command, address: str) -> BrokerTrial:
    if answer.code == SUBSCRIPTION_PARSE_FAILED:
        raise FilterSyntaxError(answer.remark or "")
    if answer.code == SUBSCRIPTION_NOT_EXIST:
        raise ConfigurationError(answer.remark or "", cure="Leave --group away, or start a member.")
    values = orjson.loads(expect_success(answer, address).body)
    messages = {
        (item["queueId"], item["queueOffset"]): item["properties"] for item in values["messages"]
    }
    return BrokerTrial(broker, values["stored"], _completed(values["report"]), messages)


def _completed(report: dict[str, Any]) -> dict[str, Any]:
    """With the shares, which follow from the counts."""
    report["match_rate"] = report["matched"] / report["rows"] if report["rows"] else 0.0
    for atom in report["atoms"]:
        told = sum(atom[name] for name in ("true", "false", "null", "error"))
        atom["selectivity"] = atom["true"] / told if told else 0.0
    return report


def _subscription_of(group: str, topic: str, address: str) -> Talk[Subscription]:
    """What a group that is online wants, as its broker says."""
    answer = yield Ask(address, requests.consumer_connections(group), must_succeed=False)
    if answer.code == SUCCESS:
        told = bodies.decode_consumer_connections(answer.body).subscriptions.get(topic)
        if told is not None:
            return told
    raise ConfigurationError(
        f"what the group {group} wants of {topic} is not known: no member is online there.",
        cure="Leave --group away, or start a member.",
    )


def _try_here(
    wanted: Subscription,
    against: Subscription | None,
    broker: str,
    limits: tuple[int, int | None, int],
    progress: Progress | None,
) -> Talk[BrokerTrial]:
    """Reads the messages from a broker that does not try filters."""
    try:
        from sluicemq.filter.lab import Trial  # noqa: PLC0415 - NumPy only when somebody asks
    except ImportError:
        raise ConfigurationError(
            "a trial on a RocketMQ broker is counted here, and NumPy is missing.",
            cure=install_extra("server"),
        ) from None
    begin_ms, end_ms, count_max = limits
    ranges = yield from _ranges(wanted.topic, broker, begin_ms, end_ms)
    stored = sum(high - low for _, low, high in ranges)
    trial = Trial(wanted, against)
    messages: dict[tuple[int, int], Mapping[str, str]] = {}
    done = 0

    def take(page: list[StoredMessage]) -> None:
        nonlocal done, messages
        rows, first = [message.properties for message in page], page[0]
        trial.add_rows(rows, first_offset=first.queue_offset, source=first.queue_id)
        messages |= {(m.queue_id, m.queue_offset): m.properties for m in page}
        messages = _kept(messages, trial.report())
        done += len(page)
        if progress is not None:
            progress(done, min(stored, count_max))

    for queue, start, high in ranges:
        low = start if stored <= count_max else high - max((high - start) * count_max // stored, 1)
        yield from _read(queue, low, high, take)
    report = orjson.loads(orjson.dumps(trial.report(), default=str))
    return BrokerTrial(broker, stored, _completed(report), messages, is_read_here=True)


def _ranges(
    topic: str, broker: str, begin_ms: int, end_ms: int | None
) -> Talk[list[tuple[MessageQueue, int, int]]]:
    found = []
    for queue in (yield from queues(topic)):
        if queue.broker != broker:
            continue
        low = yield from offset_min(queue)
        high = yield from offset_max(queue)
        if begin_ms:
            low = yield from offset_by_time(queue, begin_ms, upper=False)
        if end_ms is not None:
            high = yield from offset_by_time(queue, end_ms + 1, upper=False)
        found.append((queue, low, max(low, high)))
    return found


def _read(
    queue: MessageQueue, low: int, high: int, take: Callable[[list[StoredMessage]], None]
) -> Talk[None]:
    """Hands the messages with offsets [low, high) on, a page at a time."""
    everything = subscribe(queue.topic, None)
    while low < high:
        count = min(_PAGE, high - low)
        command = requests.pull(
            _READ_GROUP, queue, low, count_max=count, subscription=everything, bulk=True
        )
        answer = pull_answer((yield Ask(queue, command, must_succeed=False)), queue.broker)
        if answer.status is PullStatus.FOUND:
            page = decode_records(answer.data, broker=queue.broker)
            if wanted := [message for message in page if message.queue_offset < high]:
                take(wanted)
        elif answer.next_offset <= low:
            return
        low = answer.next_offset


def _kept(messages: dict[tuple[int, int], Mapping[str, str]], report: Any) -> Any:
    """Only those that the report shows."""
    samples = [*report.samples, *(cause.sample for cause in report.causes)]
    if report.difference is not None:
        samples += [*report.difference.samples_here, *report.difference.samples_there]
    places = {(int(str(sample.source)), sample.offset) for sample in samples}
    return {place: messages[place] for place in places if place in messages}
