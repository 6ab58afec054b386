"""The transactions that are still open, and how far back the two queues are needed.

Everything here follows from prepared messages and ops in the order in which they can be seen: the
same calls build the table at the start and keep it up to date. A transaction is known by its newest
prepared message; an older one of the same transaction is superseded, and wants an op of its own.

    half queue   … done done | open done open … | not seen yet
                             ^ half_low         ^ half_next

Before `half_low` everything is done, so a start reads from there; `op_low` is the first op that
says something of a message from there on. Both only go forward. Memory: the open transactions, and
a pair of numbers for each op since `op_low`.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from sluicemq.net.dispatch import Peer

HEAP_SPARE: Final = 1024


class Prepared(NamedTuple):
    """What has to be known of a prepared message. `first_offset` is that of the first one of its
    transaction, 0 when nothing says it; `began_ms` is when that one was stored; `immunity_ms` how
    long its producer asked not to be asked."""

    offset: int
    first_offset: int
    physical_offset: int
    unique_id: str
    digest: int
    began_ms: int
    stored_ms: int
    checks: int
    immunity_ms: int | None


class OpenTransaction:
    """An open transaction, by its newest prepared message that can be seen.

    `copy_offset` is that of a copy which cannot be seen yet, and `wants_check` says that it was
    written to be asked about; `is_ending` says that an end is written which cannot be seen yet;
    `asked` is who was asked last and has not answered.
    """

    __slots__ = (
        "asked", "began_ms", "checks", "copy_offset", "digest", "due_ms", "first_offset",
        "is_ending", "key", "offset", "physical_offset", "unique_id", "wants_check",
    )  # fmt: skip

    def __init__(self, key: str, message: Prepared) -> None:
        self.key = key
        self.unique_id = message.unique_id
        self.digest = message.digest
        self.first_offset = message.first_offset
        self.began_ms = message.began_ms
        self.due_ms = 0
        self.copy_offset: int | None = None
        self.asked: Peer | None = None
        self.is_ending = False
        self.wants_check = False
        self.moved(message)

    def moved(self, message: Prepared) -> None:
        """It has a newer message."""
        self.offset = message.offset
        self.physical_offset = message.physical_offset
        self.checks = message.checks


class OpenTransactions:
    """All open transactions. Iteration goes by the offsets of their messages."""

    def __init__(self, half_start: int, op_start: int) -> None:
        self._by_offset: dict[int, OpenTransaction] = {}  # the lowest offset first
        self._by_key: dict[str, OpenTransaction] = {}
        self._due: list[tuple[int, int]] = []
        self._ops: deque[tuple[int, int]] = deque()
        self.half_next = half_start
        self.op_next = op_start

    def __len__(self) -> int:
        return len(self._by_offset)

    def __iter__(self) -> Iterator[OpenTransaction]:
        return iter(self._by_offset.values())

    def at(self, offset: int) -> OpenTransaction | None:
        """The one whose newest message has this offset."""
        return self._by_offset.get(offset)

    def find(self, unique_id: str, digest: int | None = None) -> OpenTransaction | None:
        """By its id; with a digest only the very one."""
        found = self._by_key.get(unique_id)
        if digest is not None and (found is None or found.digest != digest):
            found = self._by_key.get(_second_key(unique_id, digest))
        return found

    def of(self, message: Prepared) -> OpenTransaction | None:
        """The transaction that this message, or an older one of it, belongs to."""
        found = self._by_offset.get(message.offset)
        if found is None and message.unique_id:
            found = self.find(message.unique_id, message.digest)
        return None if found is None or message.offset < found.first_offset else found

    # --- messages and ops in their order

    def add(self, message: Prepared) -> tuple[OpenTransaction, int | None]:
        """A message that is not done, and the offset that it supersedes.

        One that looks like a transaction which is ending just now, and is not its copy, is another
        one: its producer sends the same message object in a second transaction.
        """
        self.half_next = message.offset + 1
        unique_id, digest = message.unique_id, message.digest
        found = self.find(unique_id, digest) if unique_id else None
        old_offset = None
        if found is None or (found.is_ending and found.copy_offset != message.offset):
            keys = (unique_id, _second_key(unique_id, digest)) if unique_id else ()
            free = (key for key in keys if key not in self._by_key)
            found = OpenTransaction(next(free, f"{unique_id}@{message.offset}"), message)
            self._by_key[found.key] = found
        else:
            old_offset = found.offset
            del self._by_offset[old_offset]
            found.moved(message)
        self._by_offset[message.offset] = found
        return found, old_offset

    def op(self, op_offset: int, offsets: Sequence[int]) -> None:
        """An op: the messages at these offsets are done."""
        self.op_next = op_offset + 1
        if offsets:
            self._ops.append((op_offset, max(offsets)))
        for offset in offsets:
            self.close(offset)

    def close(self, offset: int) -> None:
        """This message is done; and with the newest message its transaction."""
        found = self._by_offset.pop(offset, None)
        if found is not None:
            del self._by_key[found.key]

    @property
    def half_low(self) -> int:
        """Everything before is done."""
        return next(iter(self._by_offset), self.half_next)

    def op_low(self, half_low: int) -> int:
        """The ops before say nothing of messages from `half_low` on."""
        ops = self._ops
        while ops and ops[0][1] < half_low:
            ops.popleft()
        return ops[0][0] if ops else self.op_next

    # --- when

    def plan(self, transaction: OpenTransaction, due_ms: int) -> None:
        """It is due then, and at no other time."""
        transaction.due_ms = due_ms
        heapq.heappush(self._due, (due_ms, transaction.offset))
        if len(self._due) > 2 * len(self._by_offset) + HEAP_SPARE:
            self._due = [(one.due_ms, one.offset) for one in self]
            heapq.heapify(self._due)

    def pop_due(self, now_ms: int) -> OpenTransaction | None:
        """One that is due; whoever gets it plans it anew."""
        while self._due and self._due[0][0] <= now_ms:
            due_ms, offset = heapq.heappop(self._due)
            found = self._by_offset.get(offset)
            if found is not None and found.due_ms == due_ms and not found.is_ending:
                return found
        return None


def _second_key(unique_id: str, digest: int) -> str:
    """Of a transaction whose id another open one has too."""
    return f"{unique_id}#{digest:x}"
