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
    """Return the key of a group's pops that compete with each other for messages.

    Ordered and other pops have different keys, because they find different messages.
    """
    return f"{group} in order" if is_ordered else group


@dataclass(slots=True, eq=False)
class PendingPop:
    """A pop, peek or notification from its request to its answer."""

    header: PopMessageRequest
    """The request. For a peek or notification, an equivalent pop."""
    command: Command
    """The request to answer."""
    peer: Peer
    """The connection from which the request came."""
    deadline_ms: int
    """The end of its waiting time in ms since 1970."""
    filter: MessageFilter | None = None
    """Selects the messages that it takes; None means all messages."""
    is_read_only: bool = False
    """Whether it takes no messages, like a peek or a notification."""

    @property
    def competition_key(self) -> str:
        """The key that this request shares with the waiting requests that want the same messages.

        A new message is offered to one of them at a time. Ordered pops of a group share one key,
        and its other pops another. Pops that ask for no messages, and notifications with the same
        filter, have other keys, because a message must not be offered to them instead of to a pop.
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
    """The number of messages in `data`."""
    size_bytes: int = 0
    """The size of the messages as they are stored."""
    rest_count: int = 0
    """The number of messages that remain in the queues."""
    revive_queue: int = 0
    """The id of the revive queue for the receipt handles; ORDERED for an ordered pop."""
    first_offsets: list[tuple[int, int, int]] = field(default_factory=list)
    """For each queue with messages: kind of the topic, queue id, and offset of the first message.

    For `encode_queue_info`, as the next two lists."""
    taken_offsets: list[tuple[int, int, str]] = field(default_factory=list)
    """For each queue with messages: kind of the topic, queue id, and offsets of the messages,
    separated by commas."""
    order_counts: list[tuple[int, object, int]] = field(default_factory=list)
    """For an ordered pop: kind of the topic, queue id or `qoQUEUE%OFFSET` for one message, and
    number of earlier deliveries."""
    is_stopped: bool = False
    """Whether no further queue is read in this step."""
    is_unfinished: bool = False
    """Whether nothing was found, but queues have messages that were not read.

    While a step reads, it may also be set although messages were found in another queue."""
    postponed: PostponedWork | None = None
    """The evaluation of a filter that must be finished before the next step."""
