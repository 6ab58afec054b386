"""The model of a store: what was appended, committed, synced and seen, in the order of the log.

Of a history only these facts count after a restart (the store's promise):

    power loss     the log holds a prefix of what was written, at least up to the last fsync that
                   said yes; the turn that was under way may be in it, in part
    kill           ... at least everything committed
    always         nothing else, nothing twice, every queue says what the log says
    SYNC_FLUSH     what a reader saw is there

A deleted topic is gone when `delete_topic` returned; before that it is there or not. When queue
files were taken away from outside, its records, which are still in the log, may come back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simulation.crashes.plan import Violation

Key = tuple[str, int]


@dataclass(slots=True)
class Entry:
    """A message: its place, and whether its queue shows it. `key` None: it stands in no queue."""

    key: Key | None
    body: bytes
    position: int
    offset: int
    topic: str
    unique: str = ""
    word: str = ""
    end: int = 0
    is_deleted: bool = False
    is_doubtful: bool = False


class Found(NamedTuple):
    """A message as a restarted store shows it."""

    position: int
    topic: str
    queue_id: int
    offset: int
    body: bytes


class Ledger:
    """What we know of one store."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.turn: list[Entry] = []
        self.tail: list[Entry] = []  # of a refused turn that may be on disk nevertheless
        self.synced_end = 0
        self.seen: dict[Key, dict[int, bytes]] = {}
        self.may_return = False
        self.sync_failed = False

    # --- what happens

    def committed(self, end: int) -> None:
        """The turn is written."""
        for entry in self.turn:
            entry.end = end
        self.entries += self.turn
        self.turn = []

    def refused(self, *, may_be_there: bool) -> None:
        """The commit failed: the turn has never been, unless the disk refuses everything."""
        if may_be_there and not self.tail:
            self.tail = self.turn
        self.turn = []

    def saw(self, key: Key, start: int, bodies: Iterable[bytes]) -> None:
        """A reader got these."""
        self.seen.setdefault(key, {}).update(enumerate(bodies, start))

    def deleting(self, topic: str) -> None:
        """From now on nobody knows whether the topic is there."""
        for entry in self._of_topic(topic):
            entry.is_doubtful = True
        for key in [key for key in self.seen if key[0] == topic]:
            del self.seen[key]

    def deleted(self, topic: str) -> None:
        """The topic is gone, for good."""
        for entry in self._of_topic(topic):
            entry.is_doubtful, entry.is_deleted = False, True

    def _of_topic(self, topic: str) -> list[Entry]:
        return [
            entry
            for entry in self.entries + self.turn
            if entry.key is not None and entry.key[0] == topic and not entry.is_deleted
        ]

    # --- what must be

    def live(self, key: Key) -> list[Entry]:
        """What the queue shows, once all of it is visible."""
        return [e for e in self.entries if e.key == key and not e.is_deleted and not e.is_doubtful]

    def floor(self, *, power_lost: bool) -> int:
        """How many messages of the log must be there after a restart."""
        if not power_lost and not self.sync_failed:
            return len(self.entries)
        return sum(entry.end <= self.synced_end for entry in self.entries)

    def check_log(self, found: Sequence[Found], floor: int) -> None:
        """The log holds a prefix of what was written, long enough."""
        expected = self.entries + (self.tail or self.turn)
        for index, message in enumerate(found):
            if index >= len(expected):
                raise Violation(f"phantom: the log goes on with {_short(message)}")
            entry = expected[index]
            key = (message.topic, message.queue_id)
            if (message.position, message.body) != (entry.position, entry.body) or (
                entry.key is not None and (key, message.offset) != (entry.key, entry.offset)
            ):
                raise Violation(f"message {index} of the log is {_short(message)}, not {entry}")
        if len(found) < floor:
            raise Violation(f"lost: the log has {len(found)} messages, {floor} were safe")

    def recovered(self, count: int) -> None:
        """The log ends after so many messages, which are safe now."""
        self.entries = (self.entries + (self.tail or self.turn))[:count]
        self.turn, self.tail = [], []
        for entry in self.entries:
            entry.end = 0
        self.synced_end = 0
        self.sync_failed = False

    def check_queue(self, key: Key, found: Sequence[Found]) -> None:
        """The queue shows what the log says; settles what was doubtful."""
        mine = [entry for entry in self.entries if entry.key == key]
        for shown in self._possible(mine):
            if [(e.position, e.offset, e.body) for e in shown] == [
                (m.position, m.offset, m.body) for m in found
            ]:
                break
        else:
            raise Violation(
                f"queue {key} shows {[(m.offset, m.position) for m in found]},"
                f" the log says {[(e.offset, e.position) for e in self.live(key)]}"
            )
        for entry in mine:
            entry.is_deleted = not any(entry is other for other in shown)
            entry.is_doubtful = False

    def _possible(self, mine: Sequence[Entry]) -> list[list[Entry]]:
        known = [entry for entry in mine if not entry.is_deleted]
        possible = [[entry for entry in known if not entry.is_doubtful], known]
        if self.may_return:
            again: list[Entry] = []
            for entry in mine:  # a later message with the same offset begins the queue anew
                del again[entry.offset :]
                again.append(entry)
            possible.append(again)
        return possible

    def check_seen(self, key: Key, found: Sequence[Found]) -> None:
        """SYNC_FLUSH: what a reader saw is there."""
        bodies = {message.offset: message.body for message in found}
        for offset, body in self.seen.get(key, {}).items():
            if bodies.get(offset) != body:
                raise Violation(f"a reader saw message {offset} of {key}, which is not there")


def _short(message: Found) -> str:
    return f"{message.topic}:{message.queue_id}:{message.offset} at {message.position}"
