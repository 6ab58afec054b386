"""What filters do to a group, and would do: exact lag, counters, an expression on trial.

A SluiceMQ broker counts by itself (900131, 900132). A RocketMQ broker cannot know how many messages
match (its lag counts those that the filter will drop): it is None then. A trial on one reads
the messages here, the newest of each queue.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from sluicemq.client.core import requests
from sluicemq.client.core.answers import (
    GROUP_NOT_EXIST,
    SUBSCRIPTION_NOT_EXIST,
    SUBSCRIPTION_PARSE_FAILED,
    SUCCESS,
    TOPIC_NOT_EXIST,
    expect_success,
)
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.operations.groups import (
    NOTHING_THERE,
    groups,
    progress_at,
    unknown_group,
)
from sluicemq.client.core.operations.messages import read_range
from sluicemq.client.core.operations.topics import (
    ask_each,
    ask_masters,
    masters,
    masters_of_topic,
    offset_by_time,
    offsets,
    queues,
)
from sluicemq.client.core.talks import Call, Talk
from sluicemq.errors import ConfigurationError, FilterSyntaxError, install_extra
from sluicemq.filter.check import check_subscription
from sluicemq.filter.subscriptions import subscribe
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode

UNSUPPORTED: Final = int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
ROWS_MAX: Final = 1_000_000
PULLED_MAX: Final = 100_000
"""So many messages are read from a RocketMQ broker for a trial, unless more are asked for."""
_NO_MEMBER_CURE: Final = "Leave --group away, or start a member."
Progress = Callable[[int, int], None]
"""Told how many messages were read, of how many."""


@dataclass(frozen=True, slots=True)
class TopicMatching:
    """What the filters of a group do on one broker, by topic."""

    broker: str
    topics: tuple[bodies.GroupMatching, ...]


def matching(
    directory: Directory, group: str, topic: str | None = None
) -> Talk[list[TopicMatching]]:
    """What the filters of a group have let through, kept back and failed on, and how many
    messages before it match, exactly, by broker. A RocketMQ broker does not know."""
    command = requests.filtered_lag(group=group, topic=topic)
    absent = {GROUP_NOT_EXIST, TOPIC_NOT_EXIST, UNSUPPORTED}
    answers = yield from ask_masters(directory, command, absent=absent)
    return [
        TopicMatching(broker, tuple(bodies.decode_group_matching(answer.body)))
        for broker, _, answer in answers
    ]


@dataclass(frozen=True, slots=True)
class LaneLag:
    """What one lane of a group has before it in one queue: `matching` messages from its own
    `committed` on are its."""

    lane: str
    expression: str
    committed: int
    offset_max: int
    matching: int | None


@dataclass(frozen=True, slots=True)
class QueueLag:
    """What a group has before it in one queue: the queue holds `offset_min` up to, not including,
    `offset_max`.

    `messages_at_risk` of the unread ones are deleted next, from `loss_time_ms` on (ms since 1970;
    both 0 when none is in danger, or when the broker is not ours and does not tell).
    `matching` of them get through the group's filter, exactly; None when it is not known: on a
    RocketMQ broker, or of a group that is away and subscribed by tags. `eta_ms`: in how long none
    will be left at the present pace; None when not known, or never.
    """

    group: str
    queue: MessageQueue
    committed: int
    offset_min: int
    offset_max: int
    messages_at_risk: int = 0
    loss_time_ms: int = 0
    matching: int | None = None
    eta_ms: int | None = None
    lanes: tuple[LaneLag, ...] = ()
    """Of a group whose members want different things: then `committed` is the least of them, and
    `matching` the sum."""

    @property
    def lag(self) -> int:
        """Messages that are there and not committed; a filter's misses count until passed."""
        return max(0, self.offset_max - max(self.committed, self.offset_min))

    @property
    def lost(self) -> int:
        """Messages that were deleted before the group committed them; a group that has committed
        nothing begins where it wants, and has lost none."""
        return max(0, self.offset_min - self.committed) if self.committed > 0 else 0


def lag(directory: Directory, group: str | None = None) -> Talk[list[QueueLag]]:
    """How many messages a group (None: every group) has before it in each queue, and how many
    of them are about to be deleted; how many of them the group's filter lets through."""
    names = list((yield from groups(directory))) if group is None else [group]
    brokers = yield from masters(directory)
    first: dict[str, dict[MessageQueue, int]] = {}
    found: list[QueueLag] = []
    for name in names:
        reached = yield from progress_at(brokers, name)
        known = {
            (item.broker, of_topic.topic, of_queue.queue_id): (of_topic, of_queue)
            for item in ((yield from matching(directory, name)) if reached else ())
            for of_topic in item.topics
            for of_queue in of_topic.queues
        }
        for item in reached:
            topic, broker, queue_id = item.queue
            risk = item.messages_at_risk, item.loss_time_ms
            if (counted := known.get((broker, topic, queue_id))) is not None:
                of_topic, of_queue = counted  # offsets and count of one moment
                lanes = tuple(
                    LaneLag(lane.lane, lane.expression, one.committed, one.offset_max, one.matching)
                    for lane in of_topic.lanes
                    for one in lane.queues
                    if one.queue_id == queue_id
                )
                found.append(
                    QueueLag(
                        name, item.queue, max(of_queue.committed, 0), of_queue.offset_min,
                        of_queue.offset_max, *risk, of_queue.matching, of_queue.eta_ms, lanes,
                    )
                )  # fmt: skip
                continue
            if topic not in first:  # the first stored offset of each queue
                first[topic] = {}
                command = requests.topic_stats(topic=topic)
                for _, _, answer in (yield from ask_each(brokers, command, absent=NOTHING_THERE)):
                    for queue, stats in bodies.decode_topic_stats(answer.body).queues.items():
                        first[topic][queue] = stats.offset_min
            low = first[topic].get(item.queue, 0)
            found.append(QueueLag(name, item.queue, item.committed, low, item.offset_max, *risk))
    if group is not None and not found:
        known_groups = yield from groups(directory)
        if group not in known_groups:
            raise unknown_group(group, known_groups)
    return found


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
    directory: Directory,
    topic: str,
    expression: str,
    kind: str | None = SQL92,
    *,
    begin_ms: int | None = None,
    end_ms: int | None = None,
    group: str | None = None,
    count_max: int | None = None,
    progress: Progress | None = None,
) -> Talk[list[BrokerTrial]]:
    """What an expression would do to messages stored from `begin_ms` to `end_ms`, by broker:
    nothing is consumed. With `group` beside what that one wants now.

    At most `count_max` messages are looked at, the newest of each queue; a RocketMQ broker's
    are read here, and `progress(read, of)` is called. Raises FilterSyntaxError,
    ConfigurationError, RouteNotFoundError.
    """
    wanted = subscribe(topic, expression, kind)
    check_subscription(wanted)
    found = []
    for broker, address in (yield from masters_of_topic(directory, topic)).items():
        command = requests.try_filter(wanted, group, begin_ms, end_ms, count_max or ROWS_MAX)
        answer = yield Call(address, command)
        if answer.code == SUBSCRIPTION_PARSE_FAILED:
            raise FilterSyntaxError(answer.remark or "")
        if answer.code == SUBSCRIPTION_NOT_EXIST:
            raise ConfigurationError(answer.remark or "", cure=_NO_MEMBER_CURE)
        if answer.code != UNSUPPORTED:
            values = orjson.loads(expect_success(answer, address).body)
            messages = {
                (item["queueId"], item["queueOffset"]): item["properties"]
                for item in values["messages"]
            }
            report = _with_shares(values["report"])
            found.append(BrokerTrial(broker, values["stored"], report, messages))
            continue
        against = None
        if group is not None:
            asked = yield Call(address, requests.consumer_connections(group=group))
            if asked.code == SUCCESS:
                against = bodies.decode_consumer_connections(asked.body).subscriptions.get(topic)
            if against is None:
                raise ConfigurationError(
                    f"what the group {group} wants of {topic} is not known: no member is online "
                    "there.",
                    cure=_NO_MEMBER_CURE,
                )
        limit = count_max or PULLED_MAX
        times = begin_ms or 0, end_ms
        trial = _try_here(directory, broker, wanted, against, times, limit, progress)
        found.append((yield from trial))
    return found


def _with_shares(report: dict[str, Any]) -> dict[str, Any]:
    """The shares follow from the counts."""
    report["match_rate"] = report["matched"] / report["rows"] if report["rows"] else 0.0
    for atom in report["atoms"]:
        count = sum(atom[name] for name in ("true", "false", "null", "error"))
        atom["selectivity"] = atom["true"] / count if count else 0.0
    return report


def _try_here(
    directory: Directory,
    broker: str,
    wanted: Subscription,
    against: Subscription | None,
    times: tuple[int, int | None],
    count_max: int,
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
    ranges: list[tuple[MessageQueue, int, int]] = []
    begin_ms, end_ms = times
    for queue in (yield from queues(directory, wanted.topic)):
        if queue.broker == broker:
            low, high = yield from offsets(directory, queue)
            if begin_ms:
                low = yield from offset_by_time(directory, queue, begin_ms)
            if end_ms is not None:
                high = yield from offset_by_time(directory, queue, end_ms + 1)
            ranges.append((queue, low, max(low, high)))
    stored = sum(high - low for _, low, high in ranges)
    trial = Trial(wanted, against)
    messages: dict[tuple[int, int], Mapping[str, str]] = {}
    done = 0

    def take(page: list[StoredMessage]) -> bool:
        nonlocal done, messages
        rows, first = [message.properties for message in page], page[0]
        trial.add_rows(rows, first_offset=first.queue_offset, source=first.queue_id)
        messages |= {(m.queue_id, m.queue_offset): m.properties for m in page}
        report = trial.report()  # only what it shows is kept
        samples = [*report.samples, *(cause.sample for cause in report.causes)]
        if report.difference is not None:
            samples += [*report.difference.samples_here, *report.difference.samples_there]
        places = {(int(str(sample.source)), sample.offset) for sample in samples}
        messages = {place: messages[place] for place in places if place in messages}
        done += len(page)
        if progress is not None:
            progress(done, min(stored, count_max))
        return True

    for queue, start, high in ranges:
        low = start if stored <= count_max else high - max((high - start) * count_max // stored, 1)
        yield from read_range(directory, queue, low, high, take)
    report = orjson.loads(orjson.dumps(trial.report(), default=str))
    return BrokerTrial(broker, stored, _with_shares(report), messages, is_read_here=True)
