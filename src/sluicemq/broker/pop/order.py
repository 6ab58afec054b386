"""Orderly pop: what of each queue is with a consumer, and blocks the rest of it (design/0020).

An orderly pop has no checkpoint: its messages come again from their own queue. Of each (topic,
group, queue) the last pop counts: its offsets, which of them are acknowledged, and until when the
others are hidden (spec/delivery.md §7).

    may_pop       may the group take more of the queue now? Yes when everything is acknowledged or
                  its time has passed, and for the attempt that took it: an attempt that is repeated
                  gets the same messages again
    took          a pop has taken these: they replace what was known; a message of the last pop that
                  comes again counts one more. Returns the counts for orderCountInfo
    acknowledge   one is done: the group's offset becomes that of the first that is not
    change        one is to be hidden until another time

A group that is sent elsewhere (`reset`) is blocked by nothing, and so is one whose topic is deleted
(`forget`): this follows the offsets. The pop after a reset has heard of it.

A handle counts as long as its pop time is that of the last pop; with an older one nothing happens,
and no error, since the message is with somebody else. What came again is not lost on the way: where
nothing is known of a queue, an acknowledgement moves the offset by its own message alone (RocketMQ
skips whatever is before it).

When a queue is free, `wake(topic, queue_id)` is called: by an acknowledgement, and to the
millisecond when the time of what was not acknowledged has passed.

`config/consumerOrderInfo.json` is RocketMQ's, written with the offsets, every few seconds: after a
crash a group may see messages again, sooner than it was told. What nobody has touched for a day is
left out of it, and so is what has no topic, group or queue any more.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from sluicemq.broker.documents import Document
from sluicemq.broker.offsets import SEPARATOR, Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.clock import Clock
from sluicemq.errors import RequestError
from sluicemq.files import Files
from sluicemq.net.work.background import CallLater, TimerHandle
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.tables import (
    DEFAULT_BUCKETS,
    OrderInfo,
    decode_order_file,
    encode_order_file,
    sort_integer_map_as_java,
)

KEPT_MS: Final = 24 * 3600 * 1000

Key = tuple[str, int]
"""(topic@group, queue id)"""


class Counts(NamedTuple):
    """How often messages of a pop came before: those that did, and the least of all."""

    by_offset: Mapping[int, int]
    least: int


class ConsumerOrder:
    """What orderly pops hold."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        groups: Groups,
        offsets: Offsets,
        files: Files,
        clock: Clock,
        wake: Callable[[str, int], None],
        call_later: CallLater | None = None,
    ) -> None:
        """Without `call_later` the sweep alone rings (`run`)."""
        self._topics, self._groups, self._offsets = topics, groups, offsets
        self._clock, self._wake, self._call_later = clock, wake, call_later
        self.table: dict[str, dict[int, OrderInfo]] = {}
        self.holders: dict[Key, str] = {}
        """Who popped last, since the start."""
        self._rings: list[tuple[int, Key]] = []
        self._ring_of: dict[Key, int] = {}
        """When to look at a queue: one entry of the heap counts for each."""
        self._alarm: tuple[int, TimerHandle] | None = None
        path = f"{settings.store.root}/config/consumerOrderInfo.json"
        self.document = Document(files, path, self._render)
        offsets.on_reset.append(self.reset)
        offsets.on_forget.append(self.forget)

    def load(self) -> None:
        """Raises StoreDamagedError."""
        self.table = self.document.load(decode_order_file) or {}
        self._ring_of = {
            (name, queue_id): free_ms(info)
            for name, queues in self.table.items()
            for queue_id, info in queues.items()
        }
        self._rings = sorted((time_ms, key) for key, time_ms in self._ring_of.items())

    def _render(self) -> Callable[[], str]:
        """Without what is old or has no place any more."""
        since_ms = self._clock.now_ms() - KEPT_MS
        for name in list(self.table):
            topic, _, group = name.partition(SEPARATOR)
            config = self._topics.config_of(topic)
            count = config.read_queues if config is not None and group in self._groups else 0
            kept = {
                queue_id: info
                for queue_id, info in self.table[name].items()
                if queue_id < count and info.taken_ms >= since_ms
            }
            self.table[name] = kept
            if not kept:
                del self.table[name]
        for name, queue_id in [*self.holders]:
            if queue_id not in self.table.get(name, ()):
                del self.holders[name, queue_id]
        return partial(encode_order_file, {name: {**found} for name, found in self.table.items()})

    # ------------------------------------------------------------------------------- a consumer

    def may_pop(
        self, group: str, topic: str, queue_id: int, attempt_id: str | None, now_ms: int
    ) -> bool:
        """Is nothing of the queue with another attempt?"""
        info = self._find(group, topic, queue_id)
        if info is None or (attempt_id and attempt_id == info.attempt_id):
            return True
        return free_ms(info) <= now_ms

    def took(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offsets: Sequence[int],
        attempt_id: str | None,
        pop_ms: int,
        invisible_ms: int,
        holder: str = "",
    ) -> Counts:
        """A pop of `holder` answers with the messages at `offsets` (ascending, at least one)."""
        before = self._find(group, topic, queue_id)
        counts: Mapping[int, int] | None = None
        if before is not None:
            known = before.counts or {}
            if attempt_id and attempt_id == before.attempt_id:
                counts = known
            else:
                again = {*before.offsets}
                counts = {offset: known.get(offset, 0) + 1 for offset in offsets if offset in again}
        info = OrderInfo(
            tuple(offsets), pop_ms, invisible_ms, self._clock.now_ms(), attempt_id, counts=counts
        )
        self._put(group, topic, queue_id, info)
        self.holders[f"{topic}@{group}", queue_id] = holder
        self._offsets.resets.discard(group, topic, queue_id)
        least = 0 if not counts or len(counts) != len(offsets) else min(counts.values())
        return Counts(sort_integer_map_as_java(counts or {}, DEFAULT_BUCKETS), least)

    def acknowledge(self, group: str, topic: str, queue_id: int, offset: int, pop_ms: int) -> None:
        """The message is done. Raises RequestError when it was not among those of its pop."""
        committed = self._offsets.committed(group, topic, queue_id)
        info = self._find(group, topic, queue_id)
        if offset < committed:
            return
        if info is None:
            if offset == committed:
                self._offsets.commit(group, topic, queue_id, offset + 1)
            return
        if info.pop_ms != pop_ms:
            return
        if offset not in info.offsets:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"offset is illegal, key:{topic}@{group}@{queue_id}, old:{committed}, "
                f"commit:{offset}, next:-1",
            )
        info = replace(info, done=info.done | 1 << info.offsets.index(offset))
        self._put(group, topic, queue_id, info)
        first = next(iter(hidden_ms(info)), info.offsets[-1] + 1)
        self._offsets.commit(group, topic, queue_id, first)
        if free_ms(info) <= self._clock.now_ms():
            self._wake(topic, queue_id)

    def change(
        self, group: str, topic: str, queue_id: int, offset: int, pop_ms: int, visible_ms: int
    ) -> None:
        """The message is hidden until then, if it is still with who says so."""
        info = self._find(group, topic, queue_id)
        if info is not None and info.pop_ms == pop_ms and offset in info.offsets:
            info = replace(info, visible_ms={**info.visible_ms, offset: visible_ms})
            self._put(group, topic, queue_id, info)

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Nothing of the queue is with anybody."""
        if self.table.get(f"{topic}@{group}", {}).pop(queue_id, None) is not None:
            self.document.changed = True

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """The topic, or the group, is deleted."""
        for name in list(self.table):
            first, _, second = name.partition(SEPARATOR)
            if topic == first or group == second:
                del self.table[name]
                self.document.changed = True

    def _find(self, group: str, topic: str, queue_id: int) -> OrderInfo | None:
        return self.table.get(f"{topic}@{group}", {}).get(queue_id)

    def _put(self, group: str, topic: str, queue_id: int, info: OrderInfo) -> None:
        name = f"{topic}@{group}"
        self.table.setdefault(name, {})[queue_id] = info
        self.document.changed = True
        self._ring((name, queue_id), free_ms(info))

    # ------------------------------------------------------------------------------ by the clock

    def _ring(self, key: Key, time_ms: int) -> None:
        """Look at the queue then, or before."""
        known_ms = self._ring_of.get(key)
        if not time_ms or (known_ms is not None and known_ms <= time_ms):
            return
        self._ring_of[key] = time_ms
        heapq.heappush(self._rings, (time_ms, key))
        self._plan()

    def _plan(self) -> None:
        if self._call_later is None or not self._rings:
            return
        time_ms = self._rings[0][0]
        if self._alarm is not None:
            if self._alarm[0] <= time_ms:
                return
            self._alarm[1].cancel()

        def ring() -> None:
            self._alarm = None
            self.run()

        pause_s = max(time_ms - self._clock.now_ms(), 0) / 1000
        self._alarm = time_ms, self._call_later(pause_s, ring)

    def run(self) -> None:
        """Wakes who waits for a queue of which the time has passed."""
        now_ms = self._clock.now_ms()
        while self._rings and self._rings[0][0] <= now_ms:
            time_ms, key = heapq.heappop(self._rings)
            if self._ring_of.get(key) != time_ms:
                continue
            del self._ring_of[key]
            name, queue_id = key
            info = self.table.get(name, {}).get(queue_id)
            free = free_ms(info) if info is not None else 0
            if free > now_ms:
                self._ring(key, free)
            elif free:
                self._wake(name.partition(SEPARATOR)[0], queue_id)
        self._plan()

    def stop(self) -> None:
        """Ring no more."""
        self._call_later = None
        if self._alarm is not None:
            self._alarm[1].cancel()
            self._alarm = None


def hidden_ms(info: OrderInfo) -> dict[int, int]:
    """The offsets that are not acknowledged, each with the time until when it is hidden."""
    until_ms = info.pop_ms + info.invisible_ms
    return {
        one: info.visible_ms.get(one, until_ms)
        for index, one in enumerate(info.offsets)
        if not info.done >> index & 1
    }


def free_ms(info: OrderInfo) -> int:
    """When the queue is free: the last of what is not acknowledged is no longer hidden; 0 when all
    is done."""
    return max(hidden_ms(info).values(), default=0)
