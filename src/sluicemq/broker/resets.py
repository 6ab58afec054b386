"""Offsets that were reset while consumers go on reading: 222's promise.

An offset that is only written into the table does not last: a consumer that reads the queue has
messages under way and commits them over it. So each reset stays *pending* until the consumer knows:

    pending   every commit of the group on that queue is dropped; the next pull is answered with 21
              (OFFSET_RESET) and the new offset                     -> told
    told      commits are still dropped, they may have left before the answer came; a pull from the
              new offset, or from anywhere but where it was told, is the proof that it was heard
              -> forgotten, commits count again

RocketMQ forgets a reset with the answer 21; a commit on its way then undoes it, and so does an
answer that gets lost. A pull that repeats the place where it was told has not heard: it is told
again, `TELLS_MAX` times, because a program that pulls where it likes is not to be held for ever.

What is pending stands in `config/sluiceOffsetResets.json` before 222 is answered, so that a broker
that dies tells the consumers when it is back (RocketMQ forgets it, and ignores the file). One that
dies just after a consumer has heard tells it once more: messages repeat.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

TELLS_MAX: Final = 3

Key = tuple[str, str, int]
"""(group, topic, queue id)"""


class _Reset:
    __slots__ = ("offset", "tells", "told", "told_at")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.told = ""
        self.told_at = -1
        self.tells = 0


class Resets:
    """The resets that some consumer does not know of yet."""

    __slots__ = ("_on_change", "_table")

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._table: dict[Key, _Reset] = {}
        self._on_change = on_change

    def __bool__(self) -> bool:
        return bool(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def put(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """From now on; an earlier one of the queue is replaced."""
        self._table[group, topic, queue_id] = _Reset(offset)
        self._on_change()

    def follow(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """What is before `offset` is done meanwhile: one that is pending is not told to go there.
        Commits are dropped until it is heard, so this is a broker that moved on by itself."""
        reset = self._table.get((group, topic, queue_id))
        if reset is not None and reset.offset < offset:
            reset.offset = offset
            self._on_change()

    def blocks(self, group: str, topic: str, queue_id: int) -> bool:
        """Is a commit of this group on the queue to be dropped?"""
        return (group, topic, queue_id) in self._table

    def tell(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offset: int,
        client_id: str = "",
        *,
        is_parked: bool = False,
    ) -> int | None:
        """A pull from `offset` came in: where it has to go on, None when it may go on there. With a
        `client_id` it is that client who has to hear, whoever was told before. A pull that waits
        was sent before it: it proves nothing."""
        key = (group, topic, queue_id)
        reset = self._table.get(key)
        if reset is None:
            return None
        if reset.told != client_id:
            reset.told, reset.told_at, reset.tells = client_id, -1, 0
        has_heard = reset.tells and (offset == reset.offset or offset != reset.told_at)
        if not is_parked and (has_heard or reset.tells >= TELLS_MAX):
            del self._table[key]
            self._on_change()
            return None
        reset.told_at = offset
        reset.tells += not is_parked or not reset.tells
        return reset.offset

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """The topic, or the group, is deleted."""
        for key in [key for key in self._table if group == key[0] or topic == key[1]]:
            del self._table[key]
            self._on_change()

    def heard(self, group: str, topic: str, queue_id: int) -> None:
        """Its consumer begins anew there."""
        if self._table.pop((group, topic, queue_id), None) is not None:
            self._on_change()

    def objects(self) -> list[dict[str, Any]]:
        """What is pending, for the file."""
        return [
            {"group": group, "offset": reset.offset, "queueId": queue_id, "topic": topic}
            for (group, topic, queue_id), reset in self._table.items()
        ]

    def load(self, objects: Iterable[Any]) -> None:
        """The inverse. Raises ValueError."""
        try:
            for item in objects:
                key = (str(item["group"]), str(item["topic"]), int(item["queueId"]))
                self._table[key] = _Reset(int(item["offset"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"a reset lacks a field: {error}") from error
