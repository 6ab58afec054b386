"""Decide what a consumer does: in-flight messages, statistics, options, retries, subscriptions.

`InFlight` keeps the messages of one queue that were handed out and not yet acknowledged, and the
offset that may be committed. Messages of a queue come in ascending order and are acknowledged in
any order. The committed offset is the lowest unacknowledged one or, if there is none, the one after
the last message seen. So a restart repeats messages and never skips one. Messages that the client
drops itself (a collision of tag hashes) are not in flight: the position moves past them.

    seen:   10 11 12 13 | position 14
    acked:  10    12
    commit: 11

`TopicConsumeStats` counts what a consumer did recently, topic by topic; GET_CONSUMER_RUNNING_INFO
(307) reports it. The counts of the last `RATE_WINDOW_S` seconds are kept in cells of one second
each, the failures of the last hour in cells of one minute. The caller passes the time.

`RetryRules` and `make_retry_message` are for messages that a handler could not process. Normally
the broker makes the copy that is delivered again (CONSUMER_SEND_MSG_BACK, 36). If that fails, the
client sends it: an ordinary message to %RETRY%group with the properties that the broker would have
written, such as the original topic and message id, the number of retries and the delay level
(spec/remoting.md §17). An ordered consumer always sends its dead letters that way. Retries of a
message that was read from a %DLQ% topic are counted from zero, as brokers do.

`SubscriptionRegistry` finds conflicting subscriptions before they lose messages. RocketMQ keeps one
subscription for each group and topic: if two members have different expressions, they overwrite
each other silently and messages are lost (spec/filter.md §2). Within one process the client knows
both, so it refuses the second one. Brokers with lanes serve clients with different subscriptions;
they only require that one client has one expression for a topic.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, TypedDict

from sluicemq.client.core.balance import strategy
from sluicemq.client.core.messages import OutgoingMessage
from sluicemq.client.core.names import check_number, check_topic
from sluicemq.errors import ConfigurationError, SubscriptionConflictError
from sluicemq.filter.check import check_subscription
from sluicemq.filter.subscriptions import compile_sql92, parse_subscription, tag_matches
from sluicemq.model.bodies import BODY_BYTES_MAX, COMPRESSION_BITS
from sluicemq.model.message import (
    DELAY,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    TIMER_PROPERTIES,
    TRAN_MSG,
    WAIT,
    StoredMessage,
)
from sluicemq.model.positions import check_position
from sluicemq.model.properties import forget_origin
from sluicemq.model.subscription import ALL, SQL92, TAG, Subscription
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX, MessageQueue, Strategy
from sluicemq.wire.bodies import FROM_FIRST_OFFSET, FROM_LAST_OFFSET, FROM_TIMESTAMP, TopicRates

IN_FLIGHT_COUNT_MAX: Final = 1000
"""Messages of one queue in flight before pulling pauses (RocketMQ's pullThresholdForQueue)."""
PULL_COUNT: Final = 256
"""Messages that one pull asks for. A RocketMQ broker returns up to 32, SluiceMQ up to 256 KiB."""
IN_FLIGHT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of one queue in flight before pulling pauses (100 MiB in RocketMQ)."""


class InFlight:
    """The messages of one queue that were handed out and are not acknowledged.

    `position` is the offset of the next message that has not been seen. `size_bytes` is the size of
    the messages in flight.
    """

    __slots__ = ("_sizes", "position", "size_bytes")

    def __init__(self, position: int) -> None:
        """Begin without messages; the queue is read from the offset `position`."""
        self.position: int = position
        self.size_bytes: int = 0
        self._sizes: dict[int, int] = {}
        """Maps offset to size in bytes, in ascending order of offsets."""

    def add(self, taken: Iterable[tuple[int, int]], position: int) -> None:
        """Add messages that were read from the queue, and move `position` forward.

        `taken` are pairs (offset, size in bytes), in ascending order and above all offsets in
        flight. `position` is the offset after the last message that was read, even if the reader
        dropped it. A value below the present position has no effect.
        """
        sizes = self._sizes
        last_offset = next(reversed(sizes), -1)
        for offset, size_bytes in taken:
            assert offset > last_offset, "the offsets of a queue ascend"
            last_offset = offset
            sizes[offset] = size_bytes
            self.size_bytes += size_bytes
        self.position = max(self.position, position)

    def ack(self, offset: int) -> bool:
        """Remove the message at `offset` as acknowledged; return False if it was not there."""
        size = self._sizes.pop(offset, None)
        if size is None:
            return False
        self.size_bytes -= size
        return True

    def rewind(self, waiting: Collection[int]) -> set[int]:
        """Remove messages from the end as if they had never been read, and return their offsets.

        `waiting` are the offsets of messages that no handler has started. From the highest offset
        down, messages are removed until one is not in `waiting`. `position` moves back to the
        lowest removed offset. If none is removed, the result is empty and nothing changes.
        """
        removed: set[int] = set()
        for offset in reversed(self._sizes):
            if offset not in waiting:
                break
            removed.add(offset)
        for offset in removed:
            self.size_bytes -= self._sizes.pop(offset)
        self.position = min(removed, default=self.position)
        return removed

    @property
    def count(self) -> int:
        """The number of messages in flight."""
        return len(self._sizes)

    @property
    def committable(self) -> int:
        """The offset to commit: the lowest one in flight, or the position if there is none."""
        return next(iter(self._sizes), self.position)

    @property
    def span(self) -> int:
        """The number of offsets from the lowest one in flight to the position."""
        return self.position - self.committable

    @property
    def spread(self) -> int:
        """The difference between the highest and the lowest offset in flight; 0 without messages.

        Acknowledged messages after the highest one are not counted, as in RocketMQ.
        """
        sizes = self._sizes
        return next(reversed(sizes)) - next(iter(sizes)) if sizes else 0

    def has_room(
        self,
        count_max: int = IN_FLIGHT_COUNT_MAX,
        bytes_max: int = IN_FLIGHT_BYTES_MAX,
        span_max: int | None = None,
    ) -> bool:
        """Return whether more messages may be pulled, because no limit is reached.

        The limits are `count_max` messages, `bytes_max` bytes, and `span_max` for `spread`; None
        means that `spread` is not limited.
        """
        is_narrow = span_max is None or self.spread <= span_max
        return len(self._sizes) < count_max and self.size_bytes < bytes_max and is_narrow


RATE_WINDOW_S: Final = 60
"""The time in seconds over which rates are calculated."""
_FAILURE_CELLS: Final = 60


class TopicConsumeStats:
    """What one group did with one topic, as counts over time. Times are monotonic seconds.

    `last_consume_s` is the time of the last acknowledgement, 0 before the first one.
    """

    __slots__ = (
        "_cell",
        "_cell_end_s",
        "_cells",
        "_failure_cells",
        "_undecodable_counter",
        "last_consume_s",
        "last_undecodable_error",
        "undecodable_count",
    )

    def __init__(self) -> None:
        self._undecodable_counter = itertools.count(1)
        self.undecodable_count: int = 0
        """The number of messages whose body could not be decoded, since the consumer started."""
        self.last_undecodable_error: str = ""
        """The error of the newest message whose body could not be decoded."""
        self._cells: deque[list[float]] = deque()
        """One cell for each second of the window in which something happened, oldest first.

        A cell is [second, messages pulled, messages acknowledged, messages rejected, sum of the
        times in seconds that the latter two took]. It is a list because `record_acks` is hot.
        """
        self._cell: list[float] = []
        """The last of `_cells`."""
        self._cell_end_s = 0.0
        """The time at which the next cell begins."""
        self._failure_cells: deque[list[float]] = deque()
        """[minute, messages rejected] for each minute of the last hour with a rejection."""
        self.last_consume_s: float = 0.0

    def _start_cell(self, now_s: float) -> None:
        """Append an empty cell for the second of `now_s`, and drop cells older than the window."""
        second = int(now_s)
        self._cell = [second, 0, 0, 0, 0.0]  # pulled, acknowledged, rejected, sum of times
        self._cell_end_s = second + 1.0
        self._cells.append(self._cell)
        while self._cells[0][0] <= second - RATE_WINDOW_S:
            self._cells.popleft()

    def record_pull(self, now_s: float, count: int) -> None:
        """Count the `count` messages of one pull at `now_s`."""
        if now_s >= self._cell_end_s:
            self._start_cell(now_s)
        self._cell[1] += count

    def record_acks(self, now_s: float, took_s: float, count: int = 1) -> None:
        """Count `count` messages that were acknowledged at `now_s`. HOT.

        `took_s` is the sum of the times since the application received these messages.
        """
        if now_s >= self._cell_end_s:
            self._start_cell(now_s)
        cell = self._cell
        cell[2] += count  # acknowledged
        cell[4] += took_s
        self.last_consume_s = now_s

    def record_failure(self, now_s: float, took_s: float) -> None:
        """Count a message that was rejected `took_s` seconds after the application received it."""
        if now_s >= self._cell_end_s:
            self._start_cell(now_s)
        cell = self._cell
        cell[3] += 1  # rejected
        cell[4] += took_s
        minute = int(now_s // 60)
        if not self._failure_cells or self._failure_cells[-1][0] != minute:
            self._failure_cells.append([minute, 0])
        self._failure_cells[-1][1] += 1
        while self._failure_cells[0][0] <= minute - _FAILURE_CELLS:
            self._failure_cells.popleft()

    def record_undecodable(self, error_text: str) -> int:
        """Count a message whose body could not be decoded, and return the new count.

        `error_text` says what is wrong with the body. May be called from any thread.
        """
        self.undecodable_count = next(self._undecodable_counter)
        self.last_undecodable_error = error_text
        return self.undecodable_count

    def rates(self, now_s: float) -> TopicRates:
        """Return the rates over the last `RATE_WINDOW_S` seconds, and the last hour's failures.

        `consume_ms` is the mean time of acknowledged and rejected messages; it is 0.0 without any.
        May be called from any thread, because it works on copies of the cells.
        """
        window_start = int(now_s) - RATE_WINDOW_S
        pulled = acknowledged = rejected = took_s = 0.0
        for cell in tuple(self._cells):
            second, cell_pulled, cell_acknowledged, cell_rejected, cell_took_s = tuple(cell)
            if second > window_start:
                pulled += cell_pulled
                acknowledged += cell_acknowledged
                rejected += cell_rejected
                took_s += cell_took_s
        finished = acknowledged + rejected
        consume_ms = 1000 * took_s / finished if finished else 0.0
        return TopicRates(
            pulls_per_second=pulled / RATE_WINDOW_S,
            consume_ms=consume_ms,
            done_per_second=acknowledged / RATE_WINDOW_S,
            failed_per_second=rejected / RATE_WINDOW_S,
            failures=self._count_failures(now_s),
        )

    def _count_failures(self, now_s: float) -> int:
        """Return the number of failures in the last hour."""
        hour_start = int(now_s // 60) - _FAILURE_CELLS
        failure_count = 0
        for minute, count in tuple(self._failure_cells):  # a copy: other threads change it
            if minute > hour_start:
                failure_count += int(count)
        return failure_count


FIRST_RETRY_LEVEL: Final = 3
"""The delay level of the first retry: 10 s with the default levels.

Each retry has the next level.
"""
DEAD_LETTER_LEVEL: Final = -1
"""The delay level of a message that becomes a dead letter without further retries."""
ORDERED_RETRIES_MAX: Final = 2**31 - 1
_DROPPED_PROPERTIES: Final = frozenset({DELAY, WAIT, TRAN_MSG, *TIMER_PROPERTIES})


@dataclass(frozen=True, slots=True)
class RetryRules:
    """How a group retries messages that its handler could not process.

    - `retries_max`: the number of retries before a message becomes a dead letter. None leaves that
      to the group's configuration at the broker (16), and means no limit for an ordered group.
    - `delay_level`: the delay of each retry. 0 means increasing delays (10 s, 30 s … 2 h), 1 or
      more a level of the broker, -1 a dead letter without retries.
    - `suspend_s`: how many seconds an ordered queue pauses after a failure.
    """

    retries_max: int | None = None
    delay_level: int = 0
    suspend_s: float = 1.0

    def __post_init__(self) -> None:
        if self.retries_max is not None:
            check_number("max_reconsume_times", self.retries_max, 0, ORDERED_RETRIES_MAX)
        if not isinstance(self.delay_level, int) or self.delay_level < DEAD_LETTER_LEVEL:
            raise ConfigurationError(
                f"the delay level cannot be {self.delay_level!r:.60}.",
                fix="Use 0 (increasing delays), a level of the broker (1 to 18), or -1 (dead "
                "letters).",
            )
        check_number("suspend_s", self.suspend_s, 0.01, 30, whole=False)


def retry_count(record: StoredMessage) -> int:
    """Return how many times the group has received the message again.

    It is 0 for a message of a %DLQ% topic: its own counter belongs to the group that failed.
    """
    return 0 if record.topic.startswith(DLQ_PREFIX) else record.reconsume_times


def original_topic(record: StoredMessage) -> str:
    """Return the topic that the handler sees.

    For a retry this is the topic that the group subscribes to, not the group's retry topic.
    """
    if record.topic.startswith(RETRY_PREFIX):
        return record.properties.get(RETRY_TOPIC) or record.topic
    return record.topic


def make_retry_message(
    record: StoredMessage,
    group: str,
    earlier_retries: int,
    retry_level: int,
    retries_max: int | None,
) -> OutgoingMessage:
    """Return the message to send to the topic %RETRY%group, so that `record` is delivered again.

    `earlier_retries` is the number of retries so far. `retry_level` above 0 is RocketMQ's delay
    level, 0 lets the delay grow with each retry, and below 0 means a dead letter at once.
    `retries_max` is the maximum number of retries; None means the one of the group. The body stays
    as it is stored, so that a client which can decode it may receive it.
    """
    delay_level = retry_level if retry_level > 0 else FIRST_RETRY_LEVEL + earlier_retries
    properties = _make_retry_properties(record, group)
    properties[DELAY] = str(delay_level)
    encoded_properties = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    becomes_dead_letter = retry_level < 0
    return OutgoingMessage(
        topic=RETRY_PREFIX + group,
        body=record.raw_body,
        properties=encoded_properties,
        message_id=record.message_id,
        sys_flag=record.sys_flag & COMPRESSION_BITS,
        flag=record.flag,
        wait_store_ok=True,
        reconsume_times=earlier_retries + 1,
        reconsume_times_max=0 if becomes_dead_letter else retries_max,
    )


def _make_retry_properties(record: StoredMessage, group: str) -> dict[str, str]:
    """Return the properties of a retry: those of the message, its topic and its first message id.

    Internal properties are dropped. A message that was retried before keeps the topic and the id. A
    dead letter gets its own topic.
    """
    properties = {
        name: text for name, text in record.properties.items() if name not in _DROPPED_PROPERTIES
    }
    forget_origin(properties, record.topic, group)
    if record.topic.startswith(DLQ_PREFIX):
        properties[RETRY_TOPIC] = record.topic
    properties.setdefault(RETRY_TOPIC, record.topic)
    properties.setdefault(ORIGIN_MESSAGE_ID, record.offset_message_id)
    return properties


Start = Literal["first", "last", "earliest", "latest"] | int | datetime
"""Where a group without a committed offset begins.

"first" or "earliest" means all stored messages, "last" or "latest" only new ones. A time means
messages stored since then, as a datetime (local if it has no time zone) or in milliseconds since
1970.
"""

SUSPEND_TIMEOUT_MS: Final = 15_000
LONG_POLL_GRACE_S: Final = 15.0
"""The seconds to wait for a response after the broker should have ended a long poll."""
COMMIT_PERIOD_MIN_S: Final = 0.01


OnUndecodable = Literal["deliver", "raise", "dead_letter"]
"""What becomes of a message whose body cannot be decoded.

"deliver": the application receives it like any other. `raw_body` and `body_error` can be read;
reading `body` raises UndecodableBodyError. If the handler fails, the message is retried as usual.

"raise": the call that would return the message raises the error instead, after the messages before
it were returned; a consumer with a handler stops. The message stays unacknowledged, so each later
call and each restart fails again.

"dead_letter": the message goes to the group's dead letters, unchanged and without retries, and the
application does not see it. Broadcasting groups have no dead letters.
"""
UNDECODABLE_NOTE: Final = "undecodable."
"""The prefix of entries about undecodable messages in a consumer's running information (307).

The topic follows.
"""
DELIVER: Final = "deliver"
RAISE: Final = "raise"
DEAD_LETTER: Final = "dead_letter"


def check_undecodable(on_undecodable: object, body_bytes_max: object) -> None:
    """Raise ConfigurationError if `on_undecodable` or `body_bytes_max` is not a valid option."""
    if on_undecodable not in (DELIVER, RAISE, DEAD_LETTER):
        raise ConfigurationError(
            f"on_undecodable must be 'deliver', 'raise' or 'dead_letter', got {on_undecodable!r}.",
            fix="Choose one of them.",
        )
    check_number("body_bytes_max", body_bytes_max, 1)


class ConsumeLimits(TypedDict, total=False):
    """Keyword options that all kinds of consumers accept; the defaults are in parentheses.

    - `pull_count` (256): the number of messages that one request asks for.
    - `commit_period_s` (5): the interval in seconds between commits of offsets.
    - `balance_period_s` (20): the interval in seconds between rebalances.
    - `span_max` (None): the maximum difference between the first and the last unacknowledged offset
      of a queue. None means no limit.
    - `topic_count_max`, `topic_bytes_max` (None): the maximum number and size of the unacknowledged
      messages of a topic. Its queues share them evenly. None means no limit.
    - `allocate` ("average"): the strategy that assigns queues to members: "average",
      "average_circle" or another one of `core.balance`. All members must use the same.
    - `broadcast` (False): every member receives all messages and keeps its offsets in a local file.
    - `young_from_first` (False): RocketMQ's rule for groups without an offset on queues that have
      lost no message yet; see `ConsumeOptions`.
    - `on_undecodable` ("deliver"): what becomes of a message whose body cannot be decoded; see
      `OnUndecodable`.
    - `body_bytes_max` (64 MiB): a compressed body that is larger after decompression is
      undecodable.
    """

    pull_count: int
    commit_period_s: float
    balance_period_s: float
    span_max: int | None
    topic_count_max: int | None
    topic_bytes_max: int | None
    allocate: str | Strategy
    broadcast: bool
    young_from_first: bool
    on_undecodable: OnUndecodable
    body_bytes_max: int


class ConsumeRules(ConsumeLimits, total=False):
    """Options of a stream and of a consumer with a handler, in addition to `ConsumeLimits`.

    A consumer prefetches up to `prefetch_count` messages (1,000) and `prefetch_bytes` (64 MiB) of a
    queue. The other options are those of `RetryRules`.
    """

    prefetch_count: int
    prefetch_bytes: int
    max_reconsume_times: int | None
    retry_delay_level: int
    suspend_s: float


class LitePullLimits(ConsumeLimits, total=False):
    """Options of a consumer that is polled, in addition to `ConsumeLimits`.

    It prefetches up to `count_max` messages (1,000) and `bytes_max` bytes (64 MiB) of a queue.
    """

    count_max: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class ConsumeOptions:
    """How a group consumes. Counts and bytes limit the unacknowledged messages of one queue.

    `start` only applies to queues without a committed offset that exist when the consumer starts. A
    queue that appears later, and a topic that is deleted and created again, are read from their
    first message, so that none is skipped. With `ordered`, one message of a queue is processed at a
    time, under a queue lock at its broker. With `young_from_first`, a group without an offset
    begins at the first message, whatever `start` says, while its broker still has the whole queue
    in memory.

    The other fields are described at `ConsumeLimits`. An ordered group ignores `span_max`. A
    message that a broadcasting group cannot process is dropped.
    """

    start: Start = "first"
    count_max: int = IN_FLIGHT_COUNT_MAX
    bytes_max: int = IN_FLIGHT_BYTES_MAX
    pull_count: int = PULL_COUNT
    commit_period_s: float = 5.0
    balance_period_s: float = 20.0
    auto_commit: bool = True
    ordered: bool = False
    retry: RetryRules = field(default_factory=RetryRules)
    span_max: int | None = None
    topic_count_max: int | None = None
    topic_bytes_max: int | None = None
    allocate: str | Strategy = "average"
    broadcast: bool = False
    young_from_first: bool = False
    on_undecodable: OnUndecodable = DELIVER
    body_bytes_max: int = BODY_BYTES_MAX

    def __post_init__(self) -> None:
        strategy(self.allocate)
        check_undecodable(self.on_undecodable, self.body_bytes_max)
        if self.broadcast and self.on_undecodable == DEAD_LETTER:
            raise ConfigurationError(
                "on_undecodable='dead_letter' is not possible with broadcast=True: a broadcasting "
                "group has no dead letters.",
                fix="Use on_undecodable='deliver' or 'raise'.",
            )
        for optional_limit in ("span_max", "topic_count_max", "topic_bytes_max"):
            limit = getattr(self, optional_limit)
            if limit is not None:
                check_number(optional_limit, limit, 1)
        check_number("the prefetch limit of messages", self.count_max, 1)
        check_number("the prefetch limit of bytes", self.bytes_max, 1)
        check_number("pull_count", self.pull_count, 1)
        for period in ("commit_period_s", "balance_period_s"):
            check_number(period, getattr(self, period), COMMIT_PERIOD_MIN_S, whole=False)
        object.__setattr__(self, "start", check_position(self.start, "start"))

    @property
    def start_ms(self) -> int | None:
        """The start in milliseconds since 1970 if it is a time, else None."""
        return self.start if isinstance(self.start, int) else None

    @property
    def consume_from(self) -> str:
        """The value of `start` in heartbeats. The broker only displays it."""
        if self.start == "first":
            return FROM_FIRST_OFFSET
        return FROM_LAST_OFFSET if self.start == "last" else FROM_TIMESTAMP

    @property
    def strategy(self) -> Strategy:
        """The function that `allocate` names."""
        return strategy(self.allocate)

    def queue_limits(self, queue_count: int) -> tuple[int, int]:
        """Return (messages, bytes): how many unacknowledged messages of a queue stop its pulls.

        `queue_count` is the number of queues of the topic that this member reads. The limits of the
        topic are divided evenly among them. The result is the lower of this share, which is at
        least 1, and the limit of a queue.
        """
        sharing_queues = max(1, queue_count)

        queue_count_max = self.count_max
        if self.topic_count_max is not None:
            share = max(1, self.topic_count_max // sharing_queues)
            queue_count_max = min(queue_count_max, share)

        queue_bytes_max = self.bytes_max
        if self.topic_bytes_max is not None:
            share = max(1, self.topic_bytes_max // sharing_queues)
            queue_bytes_max = min(queue_bytes_max, share)
        return queue_count_max, queue_bytes_max


@dataclass(frozen=True, slots=True)
class OffsetMoved:
    """A broker moved a group to another offset of a queue, from `old` to `new`.

    Retention deleted `lost` messages between these offsets before the group had read them. It is 0
    if the offset was reset, was behind the end of the queue, or if the topic was deleted and
    created again.
    """

    group: str
    queue: MessageQueue
    old: int
    new: int
    lost: int


def local_retry_delay_s(attempt: int) -> float:
    """Return how many seconds a message waits in this client before it is handled again.

    That happens to a message that could not be sent back to the broker. `attempt` counts its
    failures from 1. The delays are 1 s, 2 s, 4 s … 60 s.
    """
    return min(60.0, float(1 << min(attempt - 1, 6)))


def pull_pause_s(failures: int) -> float:
    """Return how many seconds a reader pauses after `failures` failed pulls in a row.

    The pauses are 0.2 s, 0.4 s … 5 s.
    """
    return min(5.0, 0.1 * float(1 << min(failures, 6)))


_log = logging.getLogger("sluicemq.client")


def make_subscription(
    topic: str, *, tags: str | None = None, where: str | None = None, version: int = 0
) -> Subscription:
    """Check a filter and return the subscription to a topic with it.

    `tags` ("A||B") or `where` (SQL92) selects messages; without both, all messages match. `version`
    is a number that grows with each change of the subscription. A valid expression that probably
    means something else than intended is logged as a warning. Raises ConfigurationError if both are
    given or one is not a string, and FilterSyntaxError if the expression is not valid.
    """
    if tags is not None and where is not None:
        raise ConfigurationError(
            "tags= and where= cannot be combined.",
            fix="Use only one of them; to filter by tag in where=, use the property TAGS, as in "
            "where=\"TAGS = 'A' AND price > 3\".",
        )
    tags_example = "tags='A||B'; to compare numbers, use where=, as in where='price > 3'"
    _check_filter_argument("tags", tags, tags_example)
    _check_filter_argument("where", where, "where='price > 3'")
    if where is None:
        expression_kind = TAG
        expression = tags or ALL
    else:
        expression_kind = SQL92
        expression = where
    check_topic(topic)
    for finding in check_subscription(Subscription(topic, expression, expression_kind)):
        _log.warning("filter %r of %s: %s %s", expression, topic, finding.what, finding.instead)
    return parse_subscription(topic, expression, expression_kind, version)


def _check_filter_argument(name: str, argument: object, example: str) -> None:
    """Raise ConfigurationError unless `argument` is a string or None; the fix has `example`."""
    if argument is not None and not isinstance(argument, str):
        raise ConfigurationError(
            f"{name} must be a string, got {argument!r:.60}.",
            fix=f"Write, for example, {example}.",
        )


def make_exact_matcher(subscription: Subscription) -> Callable[[StoredMessage], bool]:
    """Return a function that says whether the filter of a subscription matches a stored message.

    It compares the tag itself, where brokers compare only hashes of tags.
    """
    if subscription.kind == SQL92:
        selector = compile_sql92(subscription.expression)
        return lambda record: selector.matches(record.properties)
    return lambda record: tag_matches(subscription, record.tag)


@dataclass(slots=True)
class _SharedSubscription:
    """A subscription of one client, with the number of its users."""

    subscription: Subscription
    user_count: int


class SubscriptionRegistry:
    """The subscription of each client for each cluster, group and topic.

    Two clients of one process must have the same expression for a group and topic, unless the
    brokers serve both (`shared`). A user is one consumer of a client. `cluster` and `client` are
    any hashable keys. Not thread-safe: callers hold a lock.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[tuple[Hashable, str, str], dict[Hashable, _SharedSubscription]] = {}

    def add_user(
        self,
        cluster: Hashable,
        group: str,
        subscription: Subscription,
        client: Hashable = None,
        *,
        shared: bool = False,
    ) -> None:
        """Count one more consumer of a subscription in this process. `client` is its client.

        Raises SubscriptionConflictError, and changes nothing, if a client of this process has a
        different expression for the same cluster, group and topic. If `shared` is True, the brokers
        serve different expressions in one group, and only the expressions of one client must be
        equal.
        """
        subscription_by_client = self._entries.setdefault((cluster, group, subscription.topic), {})
        for other_client, shared_subscription in subscription_by_client.items():
            is_same_client = other_client == client
            if shared and not is_same_client:
                continue
            present = shared_subscription.subscription
            if _is_different(present, subscription):
                reason = "With RocketMQ's brokers, messages of one of them would be lost."
                if is_same_client:
                    reason = "A client must have one expression for a topic."
                raise SubscriptionConflictError(
                    f"the group {group!r} already reads {subscription.topic!r} in this process "
                    f"with {_format_subscription(present)}, and "
                    f"{_format_subscription(subscription)} is different. {reason}",
                    fix="Use the same expression, or another group.",
                )
        if client not in subscription_by_client:
            subscription_by_client[client] = _SharedSubscription(subscription, user_count=0)
        subscription_by_client[client].user_count += 1

    def change_subscription(
        self,
        cluster: Hashable,
        group: str,
        subscription: Subscription,
        client: Hashable = None,
        *,
        shared: bool = False,
    ) -> None:
        """Replace the subscription of all consumers of `client`; does nothing if there are none.

        Raises SubscriptionConflictError if another client of this process has a different
        expression, unless `shared` says that the brokers serve different expressions in one group.
        """
        subscription_by_client = self._entries.get((cluster, group, subscription.topic), {})
        for other_client, shared_subscription in subscription_by_client.items():
            if other_client == client or shared:
                continue
            present = shared_subscription.subscription
            if _is_different(present, subscription):
                raise SubscriptionConflictError(
                    f"another client of this process also uses the group {group!r}, with "
                    f"{_format_subscription(present)}; it would lose messages by "
                    f"{_format_subscription(subscription)}.",
                    fix="Close the other client first, or use another group for it.",
                )
        if client in subscription_by_client:
            subscription_by_client[client].subscription = subscription

    def remove_user(
        self, cluster: Hashable, group: str, topic: str, client: Hashable = None
    ) -> None:
        """Count one consumer less of a client's subscription. Does nothing if there is none.

        After the last one the subscription is removed, so that another expression is allowed.
        """
        subscription_by_client = self._entries.get((cluster, group, topic), {})
        shared_subscription = subscription_by_client.get(client)
        if shared_subscription is not None:
            shared_subscription.user_count -= 1
            if shared_subscription.user_count <= 0:
                del subscription_by_client[client]
            if not subscription_by_client:
                del self._entries[cluster, group, topic]


def _is_different(left: Subscription, right: Subscription) -> bool:
    """Return whether two subscriptions have different expressions."""
    return (left.kind, left.expression) != (right.kind, right.expression)


def _format_subscription(subscription: Subscription) -> str:
    """Return a subscription as the keyword argument that makes it, such as "tags='A'"."""
    keyword = "where" if subscription.kind == SQL92 else "tags"
    return f"{keyword}={subscription.expression!r}"
