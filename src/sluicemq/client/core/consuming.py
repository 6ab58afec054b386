"""A consumer: what is in flight, what it did lately, its options, retries and subscriptions.

`InFlight` is what was handed out of one queue and not yet acknowledged, and the offset that may be
committed. Offsets of a queue come in rising order and are acknowledged in any order. The committed
offset is the lowest one that is not acknowledged, or the position after the last one seen when
there is none: so a restart repeats messages and never skips one. Messages that the client itself
drops (a tag hash collision) never enter: the position passes them.

    seen:   10 11 12 13 | position 14
    acked:  10    12
    commit: 11

`Counts` is what a consumer did lately, topic by topic: the status table of 307. It is kept for the
last `WINDOW_S` seconds, in cells of one second each; the failures of the last hour in cells of a
minute. Times come in as arguments.

A message that a handler could not handle: how often it has come, and the copy that comes again.

Usually the broker makes the copy (36). When that fails the client sends it by itself, as an
ordinary message to %RETRY%group with what the broker would have written: where it was first read
and first lay, how often it has come, the delay level (spec/remoting.md §17). An orderly consumer
always goes that way when it gives up: the broker makes a dead letter of it.

A message that was read from a %DLQ% topic is counted from the beginning, as the broker does.

One group, one expression for each topic: conflicts are found before they lose messages.

RocketMQ keeps one subscription for a (group, topic); two members with different expressions
overwrite each other silently and messages are lost (spec/filter.md §2). Inside one process we can
see both, so the second one is refused with both expressions in the error, but where the brokers
serve two clients that want different things: a client of its own is a member of its own.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, TypedDict

from sluicemq.client.core.balance import strategy
from sluicemq.client.core.messages import Outgoing
from sluicemq.client.core.names import check_number, check_topic
from sluicemq.errors import ConfigurationError, SubscriptionConflictError
from sluicemq.filter.check import check_subscription
from sluicemq.filter.subscriptions import compile_sql92, subscribe, tag_matches
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
from sluicemq.model.properties import forget_origin
from sluicemq.model.subscription import ALL, SQL92, TAG, Subscription
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX, MessageQueue, Strategy
from sluicemq.wire.bodies import FROM_FIRST_OFFSET, FROM_LAST_OFFSET, FROM_TIMESTAMP, TopicRates

COUNT_MAX: Final = 1000
"""Messages of one queue in flight before pulling pauses (RocketMQ's pullThresholdForQueue)."""
PULL_COUNT: Final = 256
"""Messages of one request: a RocketMQ broker gives 32 of them, ours what goes into 256 KiB."""
BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of one queue in flight before pulling pauses (RocketMQ allows 100 MiB)."""


class InFlight:
    """One queue, from `position` on. `count` and `size_bytes` are what is not acknowledged."""

    __slots__ = ("_sizes", "position", "size_bytes")

    def __init__(self, position: int) -> None:
        self.position: int = position
        self.size_bytes: int = 0
        self._sizes: dict[int, int] = {}
        """By offset, in rising order."""

    def add(self, taken: Iterable[tuple[int, int]], position: int) -> None:
        """Messages were taken from the queue, (offset, bytes) in rising order, and everything below
        `position` has been seen."""
        sizes = self._sizes
        last = next(reversed(sizes), -1)
        for offset, size_bytes in taken:
            assert offset > last, "offsets of a queue rise"
            last, sizes[offset] = offset, size_bytes
            self.size_bytes += size_bytes
        self.position = max(self.position, position)

    def ack(self, offset: int) -> bool:
        """Acknowledges one message; False when it was not in flight (acknowledged before)."""
        size = self._sizes.pop(offset, None)
        if size is None:
            return False
        self.size_bytes -= size
        return True

    def back(self, waiting: Collection[int]) -> set[int]:
        """Goes back before the messages at the end that nobody was given yet (`waiting`), as if
        they had never been seen. Returns them."""
        gone: set[int] = set()
        for offset in reversed(self._sizes):
            if offset not in waiting:
                break
            gone.add(offset)
        for offset in gone:
            self.size_bytes -= self._sizes.pop(offset)
        self.position = min(gone, default=self.position)
        return gone

    @property
    def count(self) -> int:
        """So many are not acknowledged."""
        return len(self._sizes)

    @property
    def committable(self) -> int:
        """The lowest offset not acknowledged, or the position when all are."""
        return next(iter(self._sizes), self.position)

    @property
    def span(self) -> int:
        """From the lowest unacknowledged offset to the position."""
        return self.position - self.committable

    @property
    def spread(self) -> int:
        """From the lowest unacknowledged offset to the highest offset taken since: what a crash
        would repeat, at most."""
        sizes = self._sizes
        return next(reversed(sizes)) - next(iter(sizes)) if sizes else 0

    def has_room(
        self,
        count_max: int = COUNT_MAX,
        bytes_max: int = BYTES_MAX,
        span_max: int | None = None,
    ) -> bool:
        """Whether more may be pulled."""
        is_narrow = span_max is None or self.spread <= span_max
        return len(self._sizes) < count_max and self.size_bytes < bytes_max and is_narrow


WINDOW_S: Final = 60
_HOUR_CELLS: Final = 60


class Counts:
    """One group's doings with one topic."""

    __slots__ = (
        "_cell", "_cell_end_s", "_cells", "_failed", "_undecodable", "last_consume_s",
        "last_undecodable", "undecodable",
    )  # fmt: skip

    def __init__(self) -> None:
        self._undecodable = itertools.count(1)
        self.undecodable: int = 0
        """Messages whose body could not be decoded, since the consumer started."""
        self.last_undecodable: str = ""
        """What was wrong with the newest of them."""
        self._cells: deque[list[float]] = deque()
        self._cell: list[float] = []
        self._cell_end_s = 0.0
        self._failed: deque[list[float]] = deque()
        self.last_consume_s: float = 0.0

    def _next_cell(self, now_s: float) -> None:
        second = int(now_s)
        self._cell = [second, 0, 0, 0, 0.0]
        self._cell_end_s = second + 1.0
        self._cells.append(self._cell)
        while self._cells[0][0] <= second - WINDOW_S:
            self._cells.popleft()

    def pulled(self, now_s: float, count: int) -> None:
        """A pull has brought so many messages."""
        if now_s >= self._cell_end_s:
            self._next_cell(now_s)
        self._cell[1] += count

    def done(self, now_s: float, took_s: float, count: int = 1) -> None:
        """So many messages were acknowledged, so long (all in all) after the application got them.
        HOT."""
        if now_s >= self._cell_end_s:
            self._next_cell(now_s)
        cell = self._cell
        cell[2] += count
        cell[4] += took_s
        self.last_consume_s = now_s

    def failed(self, now_s: float, took_s: float) -> None:
        """A message was given back."""
        if now_s >= self._cell_end_s:
            self._next_cell(now_s)
        cell = self._cell
        cell[3] += 1
        cell[4] += took_s
        minute = int(now_s // 60)
        if not self._failed or self._failed[-1][0] != minute:
            self._failed.append([minute, 0])
        self._failed[-1][1] += 1
        while self._failed[0][0] <= minute - _HOUR_CELLS:
            self._failed.popleft()

    def cannot_decode(self, what: str) -> int:
        """Count a message whose body could not be decoded, and return how many there were. May be
        called from any thread."""
        self.undecodable = next(self._undecodable)
        self.last_undecodable = what
        return self.undecodable

    def rates(self, now_s: float) -> TopicRates:
        """Over the window. Callable from another thread: it works on copies."""
        first = int(now_s) - WINDOW_S
        cells = [tuple(cell) for cell in tuple(self._cells) if cell[0] > first]
        pulled = sum(cell[1] for cell in cells)
        done, failed = sum(cell[2] for cell in cells), sum(cell[3] for cell in cells)
        first_minute = int(now_s // 60) - _HOUR_CELLS
        failures = sum(cell[1] for cell in tuple(self._failed) if cell[0] > first_minute)
        return TopicRates(
            pulls_per_second=pulled / WINDOW_S,
            consume_ms=(
                1000 * sum(cell[4] for cell in cells) / (done + failed) if done + failed else 0.0
            ),
            done_per_second=done / WINDOW_S,
            failed_per_second=failed / WINDOW_S,
            failures=int(failures),
        )


LEVEL_FIRST: Final = 3
LEVEL_DEAD: Final = -1
"""A delay level that says: never again, dead letters."""
ORDERED_TIMES_MAX: Final = 2**31 - 1
_LEFT_OUT: Final = frozenset({DELAY, WAIT, TRAN_MSG, *TIMER_PROPERTIES})


@dataclass(frozen=True, slots=True)
class RetryRules:
    """How a group treats failures.

    `times_max` retries, then dead letters; None leaves it to the group's settings at the broker
    (16), for an ordered group it means no end. `level` is the delay of each retry: 0 the ladder
    10 s, 30 s … 2 h, n a level of the broker, -1 dead letters at once. `suspend_s` is how long an
    ordered queue rests after a failure.
    """

    times_max: int | None = None
    level: int = 0
    suspend_s: float = 1.0

    def __post_init__(self) -> None:
        if self.times_max is not None:
            check_number("max_reconsume_times", self.times_max, 0, ORDERED_TIMES_MAX)
        if not isinstance(self.level, int) or self.level < LEVEL_DEAD:
            raise ConfigurationError(
                f"the delay level is {self.level!r:.60}.",
                fix="Use 0 (the ladder), a level of the broker (1 to 18), or -1 (dead letters).",
            )
        check_number("suspend_s", self.suspend_s, 0.01, 30, whole=False)


def times_so_far(record: StoredMessage) -> int:
    """How often the group has got the message again."""
    return 0 if record.topic.startswith(DLQ_PREFIX) else record.reconsume_times


def first_topic(record: StoredMessage) -> str:
    """The topic that the handler sees: the one it subscribed to, also after a retry."""
    if record.topic.startswith(RETRY_PREFIX):
        return record.properties.get(RETRY_TOPIC) or record.topic
    return record.topic


def retry_copy(
    record: StoredMessage, group: str, times: int, level: int, times_max: int | None
) -> Outgoing:
    """Return the message to %RETRY%group; `times` is how often it has come again so far. Its body
    stays as it is stored, so one that this client cannot decode reaches a client that can."""
    properties = {name: v for name, v in record.properties.items() if name not in _LEFT_OUT}
    forget_origin(properties, record.topic, group)
    if record.topic.startswith(DLQ_PREFIX):
        properties[RETRY_TOPIC] = record.topic
    properties.setdefault(RETRY_TOPIC, record.topic)
    properties.setdefault(ORIGIN_MESSAGE_ID, record.offset_message_id)
    properties[DELAY] = str(level if level > 0 else LEVEL_FIRST + times)
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    return Outgoing(
        RETRY_PREFIX + group, record.raw_body, text, record.message_id,
        record.sys_flag & COMPRESSION_BITS, record.flag, True,
        times + 1, 0 if level < 0 else times_max,
    )  # fmt: skip


Start = Literal["first", "last"] | int | datetime
"""Where a group without a committed offset begins: all that is stored, only what comes, or a time
(milliseconds since 1970, or a datetime)."""

SUSPEND_TIMEOUT_MS: Final = 15_000
ANSWER_TIMEOUT_S: Final = 15.0
"""After the end of a long poll."""
COMMIT_PERIOD_MIN_S: Final = 0.01


OnUndecodable = Literal["deliver", "raise", "dead_letter"]
"""What becomes of a message whose body cannot be decoded.

"deliver": the application gets it like any other; `raw_body` and `body_error` can be read, and
reading `body` raises UndecodableBodyError. A handler that fails on it is retried as usual.
"raise": the call that would hand it out raises the error instead, after the messages before it were
handed out; a consumer with a handler ends. The message stays unacknowledged, so each later call and
each restart meet it again.
"dead_letter": it goes to the group's dead letters, unchanged and without retries, and the
application does not see it. Broadcasting groups have no dead letters.
"""
UNDECODABLE_NOTE: Final = "undecodable."
"""What a consumer says of undecodable messages in its running information (307): a note of this
name and the topic."""
DELIVER: Final = "deliver"
RAISE: Final = "raise"
DEAD_LETTER: Final = "dead_letter"


def check_undecodable(on_undecodable: object, body_bytes_max: object) -> None:
    """Raise ConfigurationError unless these are values of the two options of that name."""
    if on_undecodable not in (DELIVER, RAISE, DEAD_LETTER):
        raise ConfigurationError(
            f"on_undecodable must be 'deliver', 'raise' or 'dead_letter', got {on_undecodable!r}.",
            fix="Choose one of them.",
        )
    check_number("body_bytes_max", body_bytes_max, 1)


class ConsumeLimits(TypedDict, total=False):
    """What every kind of consumer takes by name besides; in brackets what holds without it.

    `pull_count` (32): messages a request. `commit_period_s` (5): how often offsets are committed,
    `balance_period_s` (20): how often it is looked who reads which queue; seconds. `span_max`
    (None): offsets between the first and the last unacknowledged message of a queue.
    `topic_count_max`, `topic_bytes_max` (None): unacknowledged messages and bytes of a topic,
    shared out among its queues. `allocate` ("average"): who reads which queue: "average",
    "average_circle" or another strategy, the same for all members.
    `broadcast` (False): every member reads everything and keeps its offsets here.
    `young_from_first` (False): RocketMQ's rule for groups without an offset on young queues.
    `on_undecodable` ("deliver"): what becomes of a message whose body cannot be decoded, see
    `OnUndecodable`. `body_bytes_max` (64 MiB): a compressed body that grows beyond it is
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
    """And what a stream and a handler take: how far they fetch ahead (`prefetch_count` messages
    (1,000) and `prefetch_bytes` (64 MiB) of a queue), and what becomes of a failure (`RetryRules`).
    """

    prefetch_count: int
    prefetch_bytes: int
    max_reconsume_times: int | None
    retry_delay_level: int
    suspend_s: float


class LitePullLimits(ConsumeLimits, total=False):
    """And those of a consumer that is polled: how many messages (1,000) and bytes (64 MiB) of a
    queue it fetches ahead."""

    count_max: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class ConsumeOptions:
    """How a group consumes. Counts and bytes are limits a queue, of what is not acknowledged.

    `start` only matters for queues without a committed offset that are there when the consumer
    starts; a queue that appears later, and a topic that is deleted and created again, are read from
    their first message, so that nothing is skipped.
    `ordered`: one message of a queue at a time, under a lock at its broker.

    `span_max`: offsets between the first and the last unacknowledged message of a queue (None: any
    number; an ordered group has no such limit). `topic_count_max` and `topic_bytes_max` are shared
    out evenly among the queues of a topic that are read here. `allocate`: who reads which queue
    (`core.balance`), the same for all members. `broadcast`: every member reads all queues, keeps
    its offsets in a file here, and what fails is dropped. `young_from_first`: RocketMQ's rule that
    a group without an offset begins at the first message, whatever `start` says, while its broker
    still has the whole queue at hand. `on_undecodable` and `body_bytes_max`: see `ConsumeLimits`.
    """

    start: Start = "first"
    count_max: int = COUNT_MAX
    bytes_max: int = BYTES_MAX
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
        for name in ("span_max", "topic_count_max", "topic_bytes_max"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1)
        check_number("the prefetch limit of messages", self.count_max, 1)
        check_number("the prefetch limit of bytes", self.bytes_max, 1)
        check_number("pull_count", self.pull_count, 1)
        for name in ("commit_period_s", "balance_period_s"):
            check_number(name, getattr(self, name), COMMIT_PERIOD_MIN_S, whole=False)
        if self.start not in ("first", "last") and not isinstance(self.start, int | datetime):
            raise ConfigurationError(
                f"start is {self.start!r}.",
                fix="Use 'first', 'last', milliseconds since 1970, or a datetime.",
            )

    @property
    def start_ms(self) -> int | None:
        """The start as milliseconds when it is a time."""
        if isinstance(self.start, datetime):
            return int(self.start.timestamp() * 1000)
        return self.start if isinstance(self.start, int) else None

    @property
    def consume_from(self) -> str:
        """As heartbeats name it; the broker only shows it."""
        if self.start == "first":
            return FROM_FIRST_OFFSET
        return FROM_LAST_OFFSET if self.start == "last" else FROM_TIMESTAMP

    @property
    def strategy(self) -> Strategy:
        """The function behind `allocate`."""
        return strategy(self.allocate)

    def limits(self, queue_count: int) -> tuple[int, int]:
        """Messages and bytes of one queue, when so many of its topic are read here."""
        count, size = self.topic_count_max, self.topic_bytes_max
        share = max(1, queue_count)
        return (
            self.count_max if count is None else min(self.count_max, max(1, count // share)),
            self.bytes_max if size is None else min(self.bytes_max, max(1, size // share)),
        )


@dataclass(frozen=True, slots=True)
class OffsetMoved:
    """The broker sent a group to another place of a queue: from offset `old` to `new`.

    `lost` messages between were deleted by retention before the group had read them; it is 0 when
    the offset was reset, lay behind the queue's end, or the topic was deleted and created again.
    """

    group: str
    queue: MessageQueue
    old: int
    new: int
    lost: int


def retry_delay_s(attempt: int) -> float:
    """How long a message that could not be sent back waits here, after its `attempt`-th failure
    (from 1): 1 s, 2 s … 60 s."""
    return min(60.0, float(1 << min(attempt - 1, 6)))


def pause_s(failures: int) -> float:
    """How long a reader waits after `failures` failed pulls in a row: 0.2 s … 5 s."""
    return min(5.0, 0.1 * float(1 << min(failures, 6)))


_log = logging.getLogger("sluicemq.client")


def make_subscription(
    topic: str, *, tags: str | None = None, where: str | None = None, version: int = 0
) -> Subscription:
    """`tags` ("A||B") or `where` (SQL92), or neither for everything.

    Raises ConfigurationError when both are given, FilterSyntaxError naming the place and the cure
    when the expression cannot work. What compiles and does something else than it seems to is
    logged as a warning.
    """
    if tags is not None and where is not None:
        raise ConfigurationError(
            "both tags= and where= are given.",
            fix="Use one; in SQL92 the tag is the property TAGS: TAGS = 'A' AND price > 3.",
        )
    for name, text in (("tags", tags), ("where", where)):
        if text is not None and not isinstance(text, str):
            raise ConfigurationError(
                f"{name} is {text!r:.60}.", fix="Give a text: tags='A||B', or where='price > 3'."
            )
    kind, expression = (TAG, tags or ALL) if where is None else (SQL92, where)
    check_topic(topic)
    for finding in check_subscription(Subscription(topic, expression, kind)):
        _log.warning("filter %r of %s: %s %s", expression, topic, finding.what, finding.instead)
    return subscribe(topic, expression, kind, version)


def exact_match(subscription: Subscription) -> Callable[[StoredMessage], bool]:
    """Does a stored message belong to a subscription? By the tag itself and the properties, not by
    hashes."""
    if subscription.kind == SQL92:
        selector = compile_sql92(subscription.expression)
        return lambda record: selector.matches(record.properties)
    return lambda record: tag_matches(subscription, record.tag)


@dataclass(slots=True)
class _Entry:
    subscription: Subscription
    users: int


class SubscriptionRegistry:
    """(cluster, group, topic) -> the expression of each client, with a count of its users. With
    `shared` the brokers serve clients that differ. Not locked: callers lock."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[tuple[Hashable, str, str], dict[Hashable, _Entry]] = {}

    def enter(
        self,
        cluster: Hashable,
        group: str,
        subscription: Subscription,
        client: Hashable = None,
        *,
        shared: bool = False,
    ) -> None:
        """Notes a user of a subscription. Raises SubscriptionConflictError."""
        clients = self._entries.setdefault((cluster, group, subscription.topic), {})
        own = clients.get(client)
        for entry in [own] if shared else clients.values():
            if entry is not None and _differ(entry.subscription, subscription):
                raise SubscriptionConflictError(
                    f"the group {group!r} already reads {subscription.topic!r} in this process "
                    f"with {_show(entry.subscription)}; now {_show(subscription)} is asked for. "
                    + (
                        "A client has one expression for a topic."
                        if entry is own
                        else "With RocketMQ's brokers messages of one of them would be lost."
                    ),
                    fix="Use the same expression, or another group.",
                )
        clients.setdefault(client, _Entry(subscription, 0)).users += 1

    def change(
        self,
        cluster: Hashable,
        group: str,
        subscription: Subscription,
        client: Hashable = None,
        *,
        shared: bool = False,
    ) -> None:
        """All users of one client go over to another expression. Raises SubscriptionConflictError
        when there are other clients, who would lose messages."""
        clients = self._entries.get((cluster, group, subscription.topic), {})
        for other, entry in clients.items():
            if other != client and not shared and _differ(entry.subscription, subscription):
                raise SubscriptionConflictError(
                    f"the group {group!r} is read by another client of this process too, with "
                    f"{_show(entry.subscription)}; {_show(subscription)} would take messages from "
                    "it.",
                    fix="Close the other one first, or give it another group.",
                )
        if client in clients:
            clients[client].subscription = subscription

    def leave(self, cluster: Hashable, group: str, topic: str, client: Hashable = None) -> None:
        """One user less; the last one frees the group for another expression."""
        clients = self._entries.get((cluster, group, topic), {})
        entry = clients.get(client)
        if entry is not None:
            entry.users -= 1
            if entry.users <= 0:
                del clients[client]
            if not clients:
                del self._entries[cluster, group, topic]


def _differ(one: Subscription, other: Subscription) -> bool:
    return (one.kind, one.expression) != (other.kind, other.expression)


def _show(subscription: Subscription) -> str:
    name = "where=" if subscription.kind == SQL92 else "tags="
    return f"{name}{subscription.expression!r}"
