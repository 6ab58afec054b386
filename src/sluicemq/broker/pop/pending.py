"""A pop, peek or notification from its request to its answer, and what it has taken so far."""

from dataclasses import dataclass, field

from sluicemq.model.subscription import MessageFilter
from sluicemq.net.dispatch import Peer
from sluicemq.store.gather import PostponedWork
from sluicemq.wire.frames import Command
from sluicemq.wire.popping import (
    PopMessageRequest,
)


def competition_key(group: str, *, is_ordered: bool) -> str:
    """Return the key of the pops of a group. Ordered and other pops find different messages."""
    return f"{group} in order" if is_ordered else group


@dataclass(slots=True, eq=False)
class PendingPop:
    """A pop, peek or notification from its request to its answer."""

    header: PopMessageRequest
    """The request. For a peek or notification, an equivalent pop."""
    command: Command
    """The request to answer."""
    peer: Peer
    deadline_ms: int
    """The end of its waiting time in ms since 1970."""
    filter: MessageFilter | None = None
    is_read_only: bool = False
    """Whether it takes no messages, like a peek or a notification."""

    @property
    def competition_key(self) -> str:
        """The key of the parked requests with which it competes for messages.

        Pops that ask for no messages, and notifications, have keys of their own: they must not
        receive an offer instead of a pop. Notifications with the same filter compete with each
        other.
        """
        header = self.header
        if header.count_max < 1:
            return f"{header.group} wants nothing"
        if self.is_read_only:
            return f"{header.group} notified {header.expression or ''}"
        return competition_key(header.group, is_ordered=header.order)


@dataclass(slots=True)
class PopResult:
    """What one step of a pop has taken from the queues that it has read."""

    pop_ms: int
    """The time of the pop in ms since 1970."""
    read_until_s: float
    """The monotonic time after which no further queue is read if the pop has a filter."""
    data: list[bytes | memoryview] = field(default_factory=list)
    """The encoded messages, to be joined for the body of the response."""
    count: int = 0
    """The number of messages."""
    size_bytes: int = 0
    rest_count: int = 0
    """The number of messages that remain in the queues."""
    revive_queue: int = 0
    first_offsets: list[tuple[int, int, int]] = field(default_factory=list)
    """Kind of the topic, queue id and first offset, for `encode_queue_info`."""
    taken_offsets: list[tuple[int, int, str]] = field(default_factory=list)
    """Kind of the topic, queue id and offsets, separated by commas."""
    order_counts: list[tuple[int, object, int]] = field(default_factory=list)
    """Kind of the topic, queue or message, and number of earlier deliveries."""
    is_stopped: bool = False
    """Whether no further queue is read in this step."""
    is_unfinished: bool = False
    """Whether nothing was found, but queues have messages that were not read."""
    postponed: PostponedWork | None = None
    """The evaluation of a filter that must be finished before the next step."""
