"""What was promised, and what was delivered.

A message's body is its number. For each the ledger knows what its sender was told, and for a
transaction what was decided; it hears of every delivery when a handler is called, returns or
raises. From that alone it says what must not be:

    phantom     a message that nobody sent, or under another topic
    early       a half message before its commit; one that was rolled back; a delayed one too soon
    order       in an ordered group, a message before the one in front of it is done
    together    in an ordered group, two clients with one queue at the same time
    lost        a committed offset above a message that no handler was given; at the end, one that
                was acknowledged to its sender and that some group never finished
    backwards   a committed offset that falls while nothing disturbs
"""

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum

from simulation.crashes.plan import Violation
from sluicemq.model.message import StoredMessage

Place = tuple[str, str, int]
"""(topic, broker, queue)"""


class Fate(Enum):
    """What a sender knows. Of a transaction: what was decided."""

    OPEN = "open"
    STORED = "stored"
    UNSURE = "unsure"
    ROLLED_BACK = "rolled back"


@dataclass(slots=True)
class Sent:
    """A message. `due_s`: not to be seen before. `runs`: its sender still works on it."""

    number: int
    topic: str
    sort: str
    fate: Fate = Fate.OPEN
    due_s: float = 0.0
    is_transaction: bool = False
    runs: bool = True

    @property
    def body(self) -> bytes:
        return b"%d" % self.number


@dataclass(slots=True)
class Group:
    """A consumer group and what it was given."""

    name: str
    topics: frozenset[str]
    is_ordered: bool
    finished: set[int] = field(default_factory=set)
    given: dict[Place, set[int]] = field(default_factory=lambda: defaultdict(set))
    done: dict[Place, int] = field(default_factory=dict)
    """Ordered: every message of the queue below this offset was finished."""
    busy: dict[Place, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """Client -> how many of its handlers have a message of the queue."""
    committed: dict[Place, int] = field(default_factory=dict)


class Ledger:
    """Everything that is known from outside."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.groups: dict[str, Group] = {}
        self.wrong: list[str] = []
        self.deliveries = 0
        self.checks_delays = True
        self.shared_until_s: dict[str, float] = {}
        """Broker -> until then, because it was restarted, a lease may be given to a second client
        (leases are not kept over a restart)."""

    def group(self, name: str, *topics: str, ordered: bool = False) -> Group:
        group = self.groups[name] = Group(name, frozenset(topics), ordered)
        return group

    def send(self, topic: str, sort: str, *, is_transaction: bool = False) -> Sent:
        """A message that is about to be sent."""
        sent = Sent(len(self.sent), topic, sort, is_transaction=is_transaction)
        self.sent.append(sent)
        return sent

    # --- deliveries

    def begins(
        self, group: Group, client: str, message: StoredMessage, now_s: float
    ) -> Sent | None:
        """A handler is called."""
        self.deliveries += 1
        sent = self._known(message)
        if sent is None:
            return None
        self._check_visible(sent, now_s)
        if group.is_ordered:
            self._check_order(group, client, message, now_s)
        return sent

    def note_given(self, group: Group, message: StoredMessage, place: Place) -> None:
        """Where it lay: it may be committed from now on."""
        group.given[place].add(message.queue_offset)

    def _known(self, message: StoredMessage) -> Sent | None:
        number = int(message.body) if message.body.isdigit() else -1
        if not 0 <= number < len(self.sent):
            self.wrong.append(f"phantom: {message.body!r} was never sent")
            return None
        return self.sent[number]

    def _check_visible(self, sent: Sent, now_s: float) -> None:
        if sent.is_transaction and sent.fate is not Fate.STORED:
            self.wrong.append(f"early: transaction {sent.number} is seen, it is {sent.fate.value}")
        if self.checks_delays and now_s < sent.due_s - 0.01:
            self.wrong.append(f"early: {sent.sort} {sent.number} is due in {sent.due_s - now_s} s")

    def _check_order(self, group: Group, client: str, message: StoredMessage, now_s: float) -> None:
        place = place_of(message)
        offset, done = message.queue_offset, group.done.get(place, 0)
        if offset > done:
            self.wrong.append(f"order: {offset} of {place} is begun, {done} is not done")
        others = [name for name, count in group.busy[place].items() if count and name != client]
        if others and now_s > self.shared_until_s.get(message.broker, -1.0):
            self.wrong.append(f"together: {client} and {others[0]} have {place}")
        group.busy[place][client] = group.busy[place].get(client, 0) + 1

    def ends(self, group: Group, client: str, message: StoredMessage, *, well: bool) -> None:
        """A handler returned (`well`), raised, or was killed with its process."""
        place = place_of(message)
        if well and message.body.isdigit():
            group.finished.add(int(message.body))
        if group.is_ordered:
            group.busy[place][client] = max(group.busy[place].get(client, 1) - 1, 0)
            if well and message.queue_offset == group.done.get(place, 0):
                group.done[place] = message.queue_offset + 1

    # --- offsets

    def commits(self, group: Group, place: Place, offset: int, *, is_calm: bool) -> None:
        """What a broker says a group has committed on a queue."""
        before = group.committed.get(place, 0)
        group.committed[place] = offset
        if is_calm and offset < before:
            self.wrong.append(f"backwards: {group.name} on {place} from {before} to {offset}")
        given = group.given[place]
        missing = [at for at in range(min(before, offset), offset) if at not in given]
        if missing:
            self.wrong.append(
                f"lost: {group.name} has committed {offset} on {place},"
                f" no handler was given {missing[:5]}"
            )

    # --- the end

    def check(self) -> None:
        """Raises Violation for the first thing that is wrong."""
        if self.wrong:
            raise Violation(self.wrong[0])

    def missing(self, group: Group) -> list[Sent]:
        """What was promised and is not finished."""
        return [
            sent
            for sent in self.sent
            if sent.fate is Fate.STORED
            and sent.topic in group.topics
            and sent.number not in group.finished
        ]


def place_of(message: StoredMessage) -> Place:
    """The queue that a record lay in."""
    return message.topic, message.broker, message.queue_id
