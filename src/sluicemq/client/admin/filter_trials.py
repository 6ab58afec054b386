"""Try a filter expression on the stored messages of a topic. Nothing is consumed.

A SluiceMQ broker tries an expression itself (900132). The messages of a RocketMQ broker are read
and judged here, the newest of each queue.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from sluicemq.client.admin.messages import read_range
from sluicemq.client.admin.topics import masters_of_topic, offset_by_time, offsets, queues
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.requests import (
    SUBSCRIPTION_NOT_EXIST,
    SUBSCRIPTION_PARSE_FAILED,
    SUCCESS,
    expect_success,
)
from sluicemq.errors import ConfigurationError, FilterSyntaxError, install_extra
from sluicemq.filter.check import check_subscription
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from sluicemq.filter.lab import Report, Trial

UNSUPPORTED: Final = int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
ROWS_MAX: Final = 1_000_000
PULLED_MAX: Final = 100_000
"""The default limit of messages that are read from a RocketMQ broker for a trial."""
_NO_MEMBER_FIX: Final = "Omit --group, or start a member."
Progress = Callable[[int, int], None]
"""A function that is called with the number of messages that were read, and that will be read."""


@dataclass(frozen=True, slots=True)
class BrokerTrial:
    """The result of trying an expression on the messages of one broker.

    `report` is a `filter.lab.Report` as a mapping, with the match rate and the selectivity of each
    condition. `stored` is the number of messages in the range of time; the report covers `rows` of
    them. The samples in the report name a queue id and an offset, and `messages` contains the
    properties of these messages by (queue id, offset). `is_read_here` is True if the broker does
    not try filters, so that its messages were read.
    """

    broker: str
    stored: int
    report: Mapping[str, Any]
    messages: Mapping[tuple[int, int], Mapping[str, str]]
    is_read_here: bool = False

    @property
    def rows(self) -> int:
        """The number of messages on which the expression was tried."""
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
) -> Conversation[list[BrokerTrial]]:
    """Try a filter expression on stored messages, and return one trial for each broker of a topic.

    Messages that were stored from `begin_ms` to `end_ms` (both inclusive) are tried; None means no
    limit. At most `count_max` messages of a broker are tried, the newest of each queue. The default
    is `ROWS_MAX`, and `PULLED_MAX` for a RocketMQ broker, whose messages must be downloaded.
    Meanwhile `progress(read, total)` is called after each page. With `group`, each report also
    compares the expression with the present filter of the group.

    Raises FilterSyntaxError for an invalid expression, ConfigurationError if the filter of `group`
    is unknown, RouteNotFoundError if the topic does not exist.
    """
    subscription = parse_subscription(topic, expression, kind)
    check_subscription(subscription)
    trials = []
    masters_by_name = yield from masters_of_topic(directory, topic)
    for broker, address in masters_by_name.items():
        command = requests.try_filter(subscription, group, begin_ms, end_ms, count_max or ROWS_MAX)
        answer = yield Call(address, command)
        if answer.code == SUBSCRIPTION_PARSE_FAILED:
            raise FilterSyntaxError(answer.remark or "")
        if answer.code == SUBSCRIPTION_NOT_EXIST:
            raise ConfigurationError(answer.remark or "", fix=_NO_MEMBER_FIX)
        if answer.code != UNSUPPORTED:
            expect_success(answer, address)
            trials.append(_read_trial(broker, answer.body))
            continue

        # A RocketMQ broker: read its messages and try the expression here.
        against = None
        if group is not None:
            against = yield from _fetch_subscription(address, group, topic)
        limit = count_max or PULLED_MAX
        time_range = begin_ms or 0, end_ms
        trial = yield from _try_on_client(
            directory, broker, subscription, against, time_range, limit, progress
        )
        trials.append(trial)
    return trials


def _read_trial(broker: str, response_body: bytes | memoryview) -> BrokerTrial:
    """Decode the response of a SluiceMQ broker that has tried a filter, and return the trial."""
    trial_result = orjson.loads(response_body)
    messages = {}
    for message in trial_result["messages"]:
        messages[message["queueId"], message["queueOffset"]] = message["properties"]
    return BrokerTrial(
        broker, trial_result["stored"], _add_shares(trial_result["report"]), messages
    )


def _fetch_subscription(address: str, group: str, topic: str) -> Conversation[Subscription]:
    """Return the subscription of a group to a topic, as the broker at `address` reports it.

    Raises ConfigurationError if the broker has none, because no member of the group is online.
    """
    subscription = None
    answer = yield Call(address, requests.consumer_connections(group=group))
    if answer.code == SUCCESS:
        connections = bodies.decode_consumer_connections(answer.body)
        subscription = connections.subscriptions.get(topic)
    if subscription is None:
        raise ConfigurationError(
            f"the filter of the group {group} for {topic} is unknown: no member is online there.",
            fix=_NO_MEMBER_FIX,
        )
    return subscription


def _add_shares(report: dict[str, Any]) -> dict[str, Any]:
    """Add shares to a report, in place, and return it.

    `match_rate` is the share of messages that match. Each atom, which is one comparison of the
    expression, gets `selectivity`: the share of its evaluations that were true. Both are 0.0
    without messages.
    """
    report["match_rate"] = report["matched"] / report["rows"] if report["rows"] else 0.0
    for atom in report["atoms"]:
        count = sum(atom[name] for name in ("true", "false", "null", "error"))
        atom["selectivity"] = atom["true"] / count if count else 0.0
    return report


def _try_on_client(
    directory: Directory,
    broker: str,
    subscription: Subscription,
    against: Subscription | None,
    time_range: tuple[int, int | None],
    count_max: int,
    progress: Progress | None,
) -> Conversation[BrokerTrial]:
    """Download the messages of a RocketMQ broker, and try the expression on them in this process.

    `against` is the present subscription of the group, to compare with; None means no comparison.
    `time_range` is (first, last) in milliseconds, both inclusive; None as the last time means no
    limit. If more than `count_max` messages are stored, each queue gives the newest in proportion
    to its share.

    Raises ConfigurationError if NumPy is not installed.
    """
    try:
        from sluicemq.filter.lab import Trial  # noqa: PLC0415 - imports NumPy
    except ImportError:
        raise ConfigurationError(
            "trying a filter on a RocketMQ broker requires NumPy, which is not installed.",
            fix=install_extra("server"),
        ) from None
    ranges = yield from _find_stored_ranges(directory, subscription.topic, broker, time_range)
    stored = sum(end - start for _, start, end in ranges)
    trial = _TrialOfPages(Trial(subscription, against), min(stored, count_max), progress)
    for queue, start, end in ranges:
        first_offset = start
        if stored > count_max:  # each queue gets its share of the limit
            first_offset = end - max((end - start) * count_max // stored, 1)
        yield from read_range(directory, queue, first_offset, end, trial.add_page)
    report = _add_shares(orjson.loads(orjson.dumps(trial.trial.report(), default=str)))
    return BrokerTrial(broker, stored, report, trial.shown_messages, is_read_here=True)


class _TrialOfPages:
    """A trial on messages that are read page by page.

    `shown_messages` are the properties of the messages that the report shows, by (queue id,
    offset).
    """

    def __init__(self, trial: "Trial", expected_count: int, progress: Progress | None) -> None:
        """Begin without messages; `trial` evaluates the expression and counts the results.

        `progress(number of messages read, expected_count)` is called after each page; None means no
        calls.
        """
        self.trial = trial
        self.shown_messages: dict[tuple[int, int], Mapping[str, str]] = {}
        self._expected_count = expected_count
        self._progress = progress
        self._read_count = 0

    def add_page(self, page: list[StoredMessage]) -> bool:
        """Try the expression on one page, which has messages of one queue with consecutive offsets.

        Returns True, so that `read_range` goes on reading.
        """
        first_message = page[0]
        self.trial.add_rows(
            [message.properties for message in page],
            first_offset=first_message.queue_offset,
            source=first_message.queue_id,
        )
        properties_by_place = dict(self.shown_messages)
        for message in page:
            properties_by_place[message.queue_id, message.queue_offset] = message.properties
        # Keep only the messages that the report shows now.
        self.shown_messages = {}
        for shown_place in _find_sample_places(self.trial.report()):
            if shown_place in properties_by_place:
                self.shown_messages[shown_place] = properties_by_place[shown_place]
        self._read_count += len(page)
        if self._progress is not None:
            self._progress(self._read_count, self._expected_count)
        return True


def _find_sample_places(report: "Report") -> set[tuple[int, int]]:
    """Return (queue id, offset) of each message that a report shows as an example."""
    samples = [*report.samples, *(cause.sample for cause in report.causes)]
    if report.difference is not None:
        samples += [*report.difference.samples_here, *report.difference.samples_there]
    return {(int(str(sample.source)), sample.offset) for sample in samples}


def _find_stored_ranges(
    directory: Directory, topic: str, broker: str, time_range: tuple[int, int | None]
) -> Conversation[list[tuple[MessageQueue, int, int]]]:
    """Return (queue, first offset, end offset) of each queue of a topic at one broker.

    A range has the messages stored from `time_range[0]` to `time_range[1]`, in milliseconds, both
    inclusive. The end offset is exclusive. 0 as the first time and None as the last mean no limit.
    """
    begin_ms, end_ms = time_range
    ranges = []
    for queue in (yield from queues(directory, topic)):
        if queue.broker != broker:
            continue
        low, high = yield from offsets(directory, queue)
        if begin_ms:
            low = yield from offset_by_time(directory, queue, begin_ms)
        if end_ms is not None:
            high = yield from offset_by_time(directory, queue, end_ms + 1)
        ranges.append((queue, low, max(low, high)))
    return ranges
