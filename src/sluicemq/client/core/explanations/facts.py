"""What is known of a message and of a group, and what may be said about them: see `rules`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sluicemq.client.core.operations.groups import GroupContract
from sluicemq.client.core.operations.traces import GroupTrace
from sluicemq.filter.selector import Explanation
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.wire.bodies import GroupMatching, QueueState


class Code(StrEnum):
    """What was found; scripts may rely on these words."""

    NO_SUCH_GROUP = "no-such-group"
    CONSUMING_OFF = "consuming-is-off"
    NO_MEMBER = "no-member"
    UNEQUAL = "unequal-subscription"
    NOT_SUBSCRIBED = "not-subscribed"
    BROKEN_FILTER = "filter-does-not-compile"
    IGNORED_TEXT = "ignored-text"
    FILTER_FALSE = "filter-false"
    FILTER_ERROR = "filter-error"
    MEMBER_IDLE = "member-without-queue"
    QUEUE_IDLE = "queue-without-member"
    OFFSET_PAST = "offset-past-message"
    RETRY_PENDING = "retry-pending"
    DEAD_LETTER = "dead-letter"
    NO_ROUTE = "no-route"
    NOT_ACKNOWLEDGING = "not-acknowledging"
    IN_HAND = "in-hand"
    BEHIND = "behind"
    ONLY_FILTERED = "only-filtered-ahead"
    NOT_KNOWN = "not-known"
    LANE = "lane"
    NO_LANE = "no-lane-matches"
    REFUSED = "refused-by-contract"
    FORGOTTEN = "subscription-forgotten"


class Fate(StrEnum):
    """What became of a message in a group."""

    CONSUMED = "consumed"
    FILTERED = "filtered"
    WAITING = "waiting"
    RETRY = "retry"
    DEAD = "dead"
    OFFLINE = "offline"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact that explains something, and what can be done."""

    code: Code
    what: str
    instead: str = ""


# ------------------------------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """A member that is online. `subscriptions` by topic and `queues` are what it says itself, None
    when it did not answer."""

    client_id: str
    subscriptions: Mapping[str, Subscription] | None = None
    queues: Mapping[MessageQueue, QueueState] | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a message in a group's retry topic or on its way there. `is_past`: the group's
    offset is beyond it; `due_ms`: until when it waits, None when it does not or is not known."""

    times: int
    is_past: bool
    due_ms: int | None = None


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """Members of a group with one subscription, at the broker of a message. `subscription`: to the
    message's topic, None for another topic; `offset` in its queue, None without a place there."""

    lane: str
    subscription: Subscription | None
    members: Sequence[str]
    offset: int | None


@dataclass(frozen=True, slots=True)
class MessageFacts:
    """A stored message and its queue, which holds [offset_min, offset_max). `routed` are the
    brokers on which clients find its topic to read, None without a route."""

    message: StoredMessage
    offset_min: int
    offset_max: int
    routed: frozenset[str] | None

    @property
    def queue(self) -> MessageQueue:
        return MessageQueue(self.message.topic, self.message.broker, self.message.queue_id)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group as seen by the broker of a message (or, for a whole group, by all). `config` is None
    when no broker knows it; `subscriptions` are the brokers' view by topic; `committed` and
    `fetched` are of the message's queue, None when there is no such offset; `lanes` from the oldest
    on, none while all members want the same."""

    name: str
    config: GroupConfig | None
    members: Sequence[MemberFacts] = ()
    subscriptions: Mapping[str, Subscription] = field(default_factory=dict)
    committed: int | None = None
    fetched: int | None = None
    copies: Sequence[Copy] = ()
    dead: Sequence[StoredMessage] = ()
    traced: GroupTrace | None = None
    now_ms: int = 0
    lanes: Sequence[LaneFacts] = ()


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """One queue of a group; `fetched` is None when the broker does not tell."""

    queue: MessageQueue
    committed: int
    offset_max: int
    fetched: int | None = None

    @property
    def lag(self) -> int:
        return max(0, self.offset_max - self.committed)


@dataclass(frozen=True, slots=True)
class GroupState:
    """A whole group. `routed`: for each topic the brokers on which clients find it, None without a
    route; `matching`: what brokers of ours count; `contracts`: whom they refuse, and what they had
    to forget."""

    facts: GroupFacts
    queues: Sequence[QueueFacts] = ()
    routed: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    matching: Sequence[tuple[str, GroupMatching]] = ()
    contracts: Sequence[GroupContract] = ()


# ----------------------------------------------------------------------------------- findings


@dataclass(frozen=True, slots=True)
class MessageExplained:
    """What became of a message in one group. `times`: of a retry, how often it has come already.
    `verdict` is the SQL92 filter on it; `owner` the member that reads its queue, "" for none, None
    when not known."""

    group: str
    fate: Fate
    findings: tuple[Finding, ...]
    times: int = 0
    verdict: Explanation | None = None
    owner: str | None = None

    @property
    def cause(self) -> Finding | None:
        """The first finding: the one to look at."""
        return self.findings[0] if self.findings else None


@dataclass(frozen=True, slots=True)
class GroupExplained:
    """Why a group is idle or behind; the first finding weighs most. None: it is up to date."""

    group: str
    findings: tuple[Finding, ...]
    lag: int
    matching: int | None
