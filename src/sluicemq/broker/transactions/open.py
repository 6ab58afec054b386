"""The transactions that are not decided yet, and how far back the two queues are still needed.

Everything here follows from halves and ops in the order in which they can be seen: the same calls
build the table at the start and keep it up to date. A transaction is known by its newest half; an
older one of the same transaction is `superseded`, and wants an op of its own.

    queue of halves   … done done | open done open … | not seen yet
                                  ^ half_low         ^ half_next

Before `half_low` everything is done, so a start reads from there; `op_low` is the first op that
says something of a half from there on. Both go forward only. Memory: the open transactions, and a
pair of numbers for each op since `op_low`.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence

from sluicemq.broker.transactions.prepared import Half
from sluicemq.net.peer import Peer

HEAP_SPARE = 1024


class Undecided:
    """One open transaction, by its newest half that can be seen.

    `copy_offset` is that of a copy which cannot be seen yet, and `wants_check` says that it was
    written to be asked about; `is_ending` says that an end is written which cannot be seen yet;
    `asked` is who was asked last and has not answered.
    """

    __slots__ = (
        "asked", "began_ms", "checks", "copy_offset", "digest", "due_ms", "first_offset",
        "is_ending", "key", "offset", "physical_offset", "unique_id", "wants_check",
    )  # fmt: skip

    def __init__(self, key: str, half: Half) -> None:
        self.key = key
        self.unique_id = half.unique_id
        self.digest = half.digest
        self.first_offset = half.first_offset
        self.began_ms = half.began_ms
        self.due_ms = 0
        self.copy_offset: int | None = None
        self.asked: Peer | None = None
        self.is_ending = False
        self.wants_check = False
        self.moved(half)

    def moved(self, half: Half) -> None:
        """It has a newer half."""
        self.offset = half.offset
        self.physical_offset = half.physical_offset
        self.checks = half.checks


class UndecidedTable:
    """All open transactions."""

    def __init__(self, half_start: int, op_start: int) -> None:
        self._by_offset: dict[int, Undecided] = {}  # the lowest offset first
        self._by_key: dict[str, Undecided] = {}
        self._due: list[tuple[int, int]] = []
        self._ops: deque[tuple[int, int]] = deque()
        self.half_next = half_start
        self.op_next = op_start

    def __len__(self) -> int:
        return len(self._by_offset)

    def __iter__(self) -> Iterator[Undecided]:
        """By the offsets of their halves."""
        return iter(self._by_offset.values())

    def at(self, offset: int) -> Undecided | None:
        """The one whose newest half has this offset."""
        return self._by_offset.get(offset)

    def find(self, unique_id: str, digest: int | None = None) -> Undecided | None:
        """By its id; with a digest only the very one."""
        found = self._by_key.get(unique_id)
        if digest is not None and (found is None or found.digest != digest):
            found = self._by_key.get(_second_key(unique_id, digest))
        return found

    def of(self, half: Half) -> Undecided | None:
        """The transaction that this half, or an older one of it, belongs to."""
        found = self._by_offset.get(half.offset)
        if found is None and half.unique_id:
            found = self.find(half.unique_id, half.digest)
        return None if found is None or half.offset < found.first_offset else found

    # --- halves and ops in their order

    def half(self, half: Half) -> tuple[Undecided, int | None]:
        """A half that is open, and the offset that it supersedes.

        One that looks like a transaction which is ending just now, and is not its copy, is another
        one: its producer sends the same message object in a second transaction.
        """
        self.half_next = half.offset + 1
        found = self.find(half.unique_id, half.digest) if half.unique_id else None
        old_offset = None
        if found is None or (found.is_ending and found.copy_offset != half.offset):
            found = Undecided(self._free_key(half), half)
            self._by_key[found.key] = found
        else:
            old_offset = found.offset
            del self._by_offset[old_offset]
            found.moved(half)
        self._by_offset[half.offset] = found
        return found, old_offset

    def _free_key(self, half: Half) -> str:
        keys = (half.unique_id, _second_key(half.unique_id, half.digest))
        free = (key for key in keys if half.unique_id and key not in self._by_key)
        return next(free, f"{half.unique_id}@{half.offset}")

    def op(self, op_offset: int, half_offsets: Sequence[int]) -> None:
        """An op: these halves are done."""
        self.op_next = op_offset + 1
        if half_offsets:
            self._ops.append((op_offset, max(half_offsets)))
        for offset in half_offsets:
            self.close(offset)

    def close(self, offset: int) -> None:
        """This half is done; and with the newest half its transaction."""
        found = self._by_offset.pop(offset, None)
        if found is not None:
            del self._by_key[found.key]

    # --- what is needed

    @property
    def half_low(self) -> int:
        """Everything before is done."""
        return next(iter(self._by_offset), self.half_next)

    def op_low(self, half_low: int) -> int:
        """The ops before say nothing of halves from `half_low` on."""
        ops = self._ops
        while ops and ops[0][1] < half_low:
            ops.popleft()
        return ops[0][0] if ops else self.op_next

    # --- when

    def plan(self, transaction: Undecided, due_ms: int) -> None:
        """It is due then, and at no other time."""
        transaction.due_ms = due_ms
        heapq.heappush(self._due, (due_ms, transaction.offset))
        if len(self._due) > 2 * len(self._by_offset) + HEAP_SPARE:
            self._due = [(one.due_ms, one.offset) for one in self]
            heapq.heapify(self._due)

    def pop_due(self, now_ms: int) -> Undecided | None:
        """One that is due; who gets it plans it anew."""
        while self._due and self._due[0][0] <= now_ms:
            due_ms, offset = heapq.heappop(self._due)
            found = self._by_offset.get(offset)
            if found is not None and found.due_ms == due_ms and not found.is_ending:
                return found
        return None


def _second_key(unique_id: str, digest: int) -> str:
    """Of a transaction whose id another open one has too."""
    return f"{unique_id}#{digest:x}"
