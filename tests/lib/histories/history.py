"""What was seen from outside, in the words of the checker.

A queue is a place to which values are appended. A send is called, and returns with an offset, with
a refusal (certainly not stored), or unsure. Values are told apart: a sender never sends one twice,
though a client that retries may store one more than once (`attempts_max`). Times are of one clock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf

Queue = tuple[str, int]
"""Topic and queue id, of one broker name."""


class Outcome(Enum):
    """What a sender knows."""

    OK = "acknowledged"
    REFUSED = "refused"
    UNSURE = "unsure"


@dataclass(slots=True)
class Send:
    """One message. `epoch`: of the master that acknowledged it, where that is known."""

    value: str
    queue: Queue | None
    called_s: float
    returned_s: float = inf
    outcome: Outcome = Outcome.UNSURE
    offset: int = -1
    epoch: int | None = None
    attempts_max: int = 1
    must_stay: bool = True
    """Is what was acknowledged promised to survive a failover? Not under ASYNC_MASTER."""

    def acknowledge(
        self, queue: Queue, offset: int, now_s: float, epoch: int | None = None
    ) -> None:
        self.outcome, self.queue, self.offset, self.epoch = Outcome.OK, queue, offset, epoch
        self.returned_s = now_s


@dataclass(slots=True)
class Timed:
    """A message that is delivered later, by a delay level or at a time of its own.

    `queue` is where it is delivered. `due_ms` is the earliest time at which it may be delivered, in
    ms since 1970. `outcome` is what the sender was told, and `answered_ms` when. `recall` is what
    the client was told that took the message back before it was due; None if no client tried to.
    """

    value: str
    queue: Queue
    due_ms: float
    kind: str
    outcome: Outcome = Outcome.UNSURE
    recall: Outcome | None = None
    answered_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Listed:
    """The values of the timed messages that a master listed as pending at `at_ms`."""

    at_ms: float
    values: frozenset[str]


@dataclass(frozen=True, slots=True)
class Seen:
    """A consumer was given `value`; `node`: by whom. `stored_ms`: the record's store time."""

    queue: Queue
    offset: int
    value: str
    at_s: float
    node: str = ""
    stored_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Filtered:
    """Of the offsets from `start` to before `stop` a filter has let these values through; it wants
    values for which `wants` holds."""

    queue: Queue
    start: int
    stop: int
    values: frozenset[str]
    filter: str
    wants: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class End:
    """A master of this epoch said that the queue ends here."""

    queue: Queue
    end: int
    called_s: float
    returned_s: float
    epoch: int


@dataclass(slots=True)
class Epoch:
    """One epoch of an exactly-once sink. Each commit that a driver asks for offers the values of
    one attempt of each task; `staged` are those of all attempts."""

    name: str
    staged: set[str] = field(default_factory=set)
    offers: list[frozenset[str]] = field(default_factory=list)
    committed_at: int | None = None
    """How many offers there had been when one was answered: what is asked later has no effect."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is promised and stands in no queue: a topic, an offset that was reset, a rule."""

    value: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class TermSeen:
    """One value of the record `state`, in the order of its versions."""

    epoch: int
    master: int
    life: str
    in_sync: Mapping[int, str]
    is_unclean: bool = False
    at_ms: float = inf
    """The latest time at which this value may have been written, in ms since 1970."""


@dataclass(slots=True)
class Left:
    """What a replica has when everything has come to rest."""

    name: str
    queues: dict[Queue, dict[int, str]] = field(default_factory=dict)
    """Offset -> value, of what it shows."""
    changes: frozenset[str] = frozenset()
    log: bytes | tuple[object, ...] = b""
    """From `log_start` on, to be compared with the other replicas'."""
    log_start: int = 0


@dataclass(slots=True)
class History:
    """One run."""

    sends: list[Send] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    filtered: list[Filtered] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    listed: list[Listed] = field(default_factory=list)
    """Lists of pending messages that were taken after the last fault."""
    epoch_ms: float = 0.0
    """When the clock of the history was 0, in ms since 1970."""
    early_ms: float = 1.0
    """How far a delivery may be before its time because clocks are read once for several things."""
    has_true_clocks: bool = True
    """Whether the replicas' clocks were right throughout, so that an early delivery is an error."""
    timers_come_once: bool = False
    """Whether a message with a timer property is delivered once, whatever masters there were."""
    returns: int = 0
    """How often a former master became master again because the history made it."""
    terms: list[TermSeen] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    """The master's first."""
