"""Numbers and choices of a consumer: where a new group starts, how much is fetched ahead."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

from sluicemq.client.core.balance import Strategy, strategy
from sluicemq.client.core.inflight import BYTES_MAX, COUNT_MAX
from sluicemq.client.core.retrying import RetryRules
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue
from sluicemq.protocol.bodies import FROM_FIRST_OFFSET, FROM_LAST_OFFSET, FROM_TIMESTAMP

Start = Literal["first", "last"] | int | datetime
"""Where a group without a committed offset begins: all that is stored, only what comes, or a time
(milliseconds since 1970, or a datetime)."""

SUSPEND_TIMEOUT_MS: Final = 15_000
ANSWER_TIMEOUT_S: Final = 15.0
"""After the end of a long poll."""
COMMIT_PERIOD_MIN_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class ConsumeOptions:
    """How a group consumes. Counts and bytes are limits a queue, of what is not acknowledged.

    `start` only matters for queues without a committed offset that are there when the consumer
    starts; a queue that appears later is read from its first message, so that nothing is skipped.
    `ordered`: one message of a queue at a time, under a lock at its broker.

    `span_max`: offsets between the first and the last unacknowledged message of a queue (None: any
    number; an ordered group has no such limit). `topic_count_max` and `topic_bytes_max` are shared
    out evenly among the queues of a topic that are read here. `allocate`: who reads which queue
    (`core.balance`), the same for all members. `broadcast`: every member reads all queues, keeps
    its offsets in a file here, and what fails is dropped. `young_from_first`: RocketMQ's rule that
    a group without an offset begins at the first message, whatever `start` says, while its broker
    still has the whole queue at hand.
    """

    start: Start = "first"
    count_max: int = COUNT_MAX
    bytes_max: int = BYTES_MAX
    pull_count: int = 32
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

    def __post_init__(self) -> None:
        strategy(self.allocate)
        limits = (self.span_max, self.topic_count_max, self.topic_bytes_max)
        if any(limit is not None and limit < 1 for limit in limits):
            raise ConfigurationError(
                "a limit of a topic or span is below 1.", cure="Use 1 or more, or None for none."
            )
        if self.commit_period_s < COMMIT_PERIOD_MIN_S:
            raise ConfigurationError(
                f"offsets would be committed every {self.commit_period_s} s.",
                cure=f"Use {COMMIT_PERIOD_MIN_S} s or more.",
            )
        if self.start not in ("first", "last") and not isinstance(self.start, int | datetime):
            raise ConfigurationError(
                f"start is {self.start!r}.",
                cure="Use 'first', 'last', milliseconds since 1970, or a datetime.",
            )
        if self.count_max < 1 or self.bytes_max < 1 or self.pull_count < 1:
            raise ConfigurationError("a prefetch limit is below 1.", cure="Use 1 or more.")

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
    the offset was reset, or lay behind the queue's end.
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
