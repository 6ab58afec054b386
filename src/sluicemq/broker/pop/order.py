"""Ordered pops: which messages of a queue are in flight and block the rest of it.

Ordered pops have no checkpoints, as their messages become visible again in their own queue
(design/0020). For each topic, group and queue, `OrderedPops` knows the last pop (`OrderInfo`): its
offsets, which of them are acknowledged, and until when the others are invisible
(spec/delivery.md §7). A queue is *free* when all messages of its last pop are acknowledged or
visible again.

A receipt handle is valid while its pop time is that of the last pop. Acknowledging with an older
handle has no effect and causes no error, because the message was delivered to another consumer. If
nothing is known of a queue, an acknowledgement moves the committed offset past its own message
only; RocketMQ skips all messages before it.

An offset reset, and the deletion of a topic or group, make the queue free. The first pop after a
reset is at the new offset, so the reset is thereby known to the consumers.

The file `config/consumerOrderInfo.json` is RocketMQ's. It is written with the offsets, every few
seconds: after a crash, messages may become visible earlier than promised. Entries whose last pop is
a day old, and entries of topics, groups and queues that do not exist, are not saved.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from sluicemq.broker.context import BrokerContext
from sluicemq.broker.documents import Document
from sluicemq.broker.offsets import SEPARATOR
from sluicemq.errors import RequestError
from sluicemq.net.work.background import TimerHandle
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.tables import (
    DEFAULT_BUCKETS,
    OrderInfo,
    decode_order_file,
    encode_order_file,
    sort_integer_map_as_java,
)

RETENTION_MS: Final = 24 * 3600 * 1000
"""An entry is removed this long after its pop."""

Key = tuple[str, int]
"""`topic@group`, and the queue id."""


class RedeliveryCounts(NamedTuple):
    """The number of earlier deliveries of the messages of one pop."""

    by_offset: Mapping[int, int]
    """By offset, without messages that were not delivered before."""
    minimum: int
    """The smallest count of all messages of the pop."""


class OrderedPops:
    """The last ordered pop of each group and queue, with its file and wake-ups."""

    def __init__(
        self,
        context: BrokerContext,
        wake: Callable[[str, int], None],
    ) -> None:
        """Create an empty table. `load` reads the file.

        `wake(topic, queue_id)` is called as soon as a queue can be popped again. That is the case
        when the messages of its last pop are acknowledged, or when the time is over for which they
        are invisible. For the second case, the caller must call `wake_free_queues` regularly if the
        context has no `call_later`.
        """
        settings = context.settings
        offsets = context.offsets
        self._topics = context.topics
        self._groups = context.groups
        self._offsets = offsets
        self._clock = context.steady_clock
        self._wake = wake
        self._call_later = context.call_later
        self.table: dict[str, dict[int, OrderInfo]] = {}
        """By `topic@group` and queue id: the last pop."""
        self.popped_by: dict[Key, str] = {}
        """The client id or address of the consumer of the last pop. It is not saved, so a queue is
        missing if it was last popped before the broker started."""
        self._wakeups: list[tuple[int, Key]] = []
        """A heap of times in ms since 1970 and queues to wake if they are free then."""
        self._wakeup_of: dict[Key, int] = {}
        """The time of each queue. Entries of the heap with another time are ignored."""
        self._timer: tuple[int, TimerHandle] | None = None
        """The time of the next call of `wake_free_queues` in ms since 1970, and its handle."""
        path = f"{settings.store.root}/config/consumerOrderInfo.json"
        self.document = Document(context.files, path, self._render)
        offsets.on_reset.append(self.forget_queue)
        offsets.on_forget.append(self.forget_deleted)

    def load(self) -> None:
        """Load the file, and schedule a wake-up for each queue in it.

        Raises StoreDamagedError if the file cannot be parsed.
        """
        self.table = self.document.load(decode_order_file) or {}
        self._wakeup_of = {}
        for name, last_pops in self.table.items():
            for queue_id, last_pop in last_pops.items():
                self._wakeup_of[name, queue_id] = find_free_ms(last_pop)
        self._wakeups = [(time_ms, key) for key, time_ms in self._wakeup_of.items()]
        self._wakeups.sort()

    def _render(self) -> Callable[[], str]:
        """Remove old pops, and return a function that returns the text of the file.

        The function may be called on another thread, because it uses a copy of the table. Pops are
        removed if they are older than RETENTION_MS, or if their topic, group or queue does not
        exist any more.
        """
        since_ms = self._clock.now_ms() - RETENTION_MS
        for name in list(self.table):
            queue_count = self._count_queues(name)
            remaining_pops = {
                queue_id: last_pop
                for queue_id, last_pop in self.table[name].items()
                if queue_id < queue_count and last_pop.taken_ms >= since_ms
            }
            if remaining_pops:
                self.table[name] = remaining_pops
            else:
                del self.table[name]
        for name, queue_id in [*self.popped_by]:
            if queue_id not in self.table.get(name, ()):
                del self.popped_by[name, queue_id]

        table_copy = {name: {**last_pops} for name, last_pops in self.table.items()}
        return partial(encode_order_file, table_copy)

    def _count_queues(self, name: str) -> int:
        """Return the number of queues of a topic; 0 if the topic or the group does not exist.

        `name` is `topic@group`, a key of the table.
        """
        topic, _, group = name.partition(SEPARATOR)
        config = self._topics.config_of(topic)
        if config is None or group not in self._groups:
            return 0
        return config.read_queues

    # -------------------------------------------------------------------------------- requests

    def can_pop(
        self, group: str, topic: str, queue_id: int, attempt_id: str | None, now_ms: int
    ) -> bool:
        """Return whether the group may take messages of the queue at the time `now_ms`.

        It may if all messages of the last pop are acknowledged or visible again. It also may if the
        last pop had the same `attempt_id`, because a repeated attempt gets the same messages again.
        An `attempt_id` of None or "" equals no other one.
        """
        last_pop = self._get_last_pop(group, topic, queue_id)
        if last_pop is None or (attempt_id and attempt_id == last_pop.attempt_id):
            return True
        return find_free_ms(last_pop) <= now_ms

    def record_pop(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offsets: Sequence[int],
        attempt_id: str | None,
        pop_ms: int,
        invisible_ms: int,
        popped_by: str = "",
    ) -> RedeliveryCounts:
        """Record that a pop took the messages at `offsets` (ascending, at least one).

        The pop replaces the last one of the queue. `popped_by` is the client id or address of the
        consumer. `wake` will be called when the messages are visible again. A pending reset of the
        queue is removed, because the pop follows it.

        Return how often the messages were delivered before. A message that the last pop took as
        well has the count of that pop plus 1. If both pops have the same `attempt_id`, the counts
        of the last pop are returned.
        """
        # Count earlier deliveries by means of the last pop.
        last_pop = self._get_last_pop(group, topic, queue_id)
        counts: Mapping[int, int] | None = None
        if last_pop is not None:
            counts = _count_deliveries(last_pop, offsets, attempt_id)

        # Replace the last pop by this one.
        this_pop = OrderInfo(
            tuple(offsets), pop_ms, invisible_ms, self._clock.now_ms(), attempt_id, counts=counts
        )
        self._set_last_pop(group, topic, queue_id, this_pop)
        self.popped_by[f"{topic}@{group}", queue_id] = popped_by
        self._offsets.resets.discard(group, topic, queue_id)

        # A message that was not delivered before has no count. Then the minimum is 0.
        minimum = 0
        if counts and len(counts) == len(offsets):
            minimum = min(counts.values())
        return RedeliveryCounts(sort_integer_map_as_java(counts or {}, DEFAULT_BUCKETS), minimum)

    def acknowledge(self, group: str, topic: str, queue_id: int, offset: int, pop_ms: int) -> None:
        """Acknowledge the message at `offset`, which the pop at the time `pop_ms` took.

        The committed offset of the group moves to the first message of the pop that is not
        acknowledged. If all are, it moves to the offset after the last one. If the queue can be
        popped again then, `wake` is called.

        Nothing happens if `pop_ms` is not the time of the last pop, or if the message is before the
        committed offset. If no pop of the queue is known, the committed offset moves only if
        `offset` is the next one.

        Raises RequestError (MESSAGE_ILLEGAL) if the last pop did not take the message.
        """
        committed = self._offsets.committed(group, topic, queue_id)
        last_pop = self._get_last_pop(group, topic, queue_id)
        if offset < committed:
            return
        if last_pop is None:
            if offset == committed:
                self._offsets.commit(group, topic, queue_id, offset + 1)
            return
        if last_pop.pop_ms != pop_ms:
            return
        if offset not in last_pop.offsets:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"offset is illegal, key:{topic}@{group}@{queue_id}, old:{committed}, "
                f"commit:{offset}, next:-1",
            )

        # `done` has a bit for each message of the pop: 1 if it is acknowledged.
        acknowledged_bit = 1 << last_pop.offsets.index(offset)
        changed_pop = replace(last_pop, done=last_pop.done | acknowledged_bit)
        self._set_last_pop(group, topic, queue_id, changed_pop)
        offset_after_pop = changed_pop.offsets[-1] + 1
        first_pending_offset = next(iter(find_invisible_until_ms(changed_pop)), offset_after_pop)
        self._offsets.commit(group, topic, queue_id, first_pending_offset)
        if find_free_ms(changed_pop) <= self._clock.now_ms():
            self._wake(topic, queue_id)

    def set_visible_time(
        self, group: str, topic: str, queue_id: int, offset: int, pop_ms: int, visible_ms: int
    ) -> None:
        """Set the time from which a popped message can be delivered again to `visible_ms`.

        `offset` is the offset of the message, and `pop_ms` the time of its pop. Both times are in
        ms since 1970. Nothing happens if `pop_ms` is not the time of the last pop, or if that pop
        did not take the message.
        """
        last_pop = self._get_last_pop(group, topic, queue_id)
        if last_pop is None or last_pop.pop_ms != pop_ms or offset not in last_pop.offsets:
            return
        new_times = {**last_pop.visible_ms, offset: visible_ms}
        self._set_last_pop(group, topic, queue_id, replace(last_pop, visible_ms=new_times))

    def forget_queue(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Make a queue free, because the group's committed offset was reset. It is not woken.

        `offset` is the new offset. It is not used: `Offsets.on_reset` passes it.
        """
        if self.table.get(f"{topic}@{group}", {}).pop(queue_id, None) is not None:
            self.document.changed = True

    def forget_deleted(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Remove the pops of a deleted topic or group, so that its queues are free."""
        for name in list(self.table):
            its_topic, _, its_group = name.partition(SEPARATOR)
            if topic == its_topic or group == its_group:
                del self.table[name]
                self.document.changed = True

    def _get_last_pop(self, group: str, topic: str, queue_id: int) -> OrderInfo | None:
        """Return the last pop of a queue; None if no pop of it is known."""
        return self.table.get(f"{topic}@{group}", {}).get(queue_id)

    def _set_last_pop(self, group: str, topic: str, queue_id: int, last_pop: OrderInfo) -> None:
        """Set the last pop of a queue, and schedule a wake-up for the time when it is free."""
        name = f"{topic}@{group}"
        self.table.setdefault(name, {})[queue_id] = last_pop
        self.document.changed = True
        self._schedule_wakeup((name, queue_id), find_free_ms(last_pop))

    # --------------------------------------------------------------------------------- wake-ups

    def _schedule_wakeup(self, key: Key, time_ms: int) -> None:
        """Schedule a wake-up of the queue `key` at `time_ms`, in ms since 1970.

        Do nothing if a wake-up is scheduled for the same time or earlier, because it schedules the
        next one if the queue cannot be popped then. Do nothing if `time_ms` is 0, because the queue
        can be popped now, and `acknowledge` wakes it.
        """
        scheduled_ms = self._wakeup_of.get(key)
        if not time_ms or (scheduled_ms is not None and scheduled_ms <= time_ms):
            return
        self._wakeup_of[key] = time_ms
        heapq.heappush(self._wakeups, (time_ms, key))
        self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer that calls `wake_free_queues` at the time of the first wake-up.

        A later timer is replaced. Do nothing without a wake-up, or without `call_later`.
        """
        if self._call_later is None or not self._wakeups:
            return
        time_ms = self._wakeups[0][0]
        if self._timer is not None:
            if self._timer[0] <= time_ms:
                return
            self._timer[1].cancel()

        def handle_timeout() -> None:
            # Before the call, which may set the next timer.
            self._timer = None
            self.wake_free_queues()

        delay_s = max(time_ms - self._clock.now_ms(), 0) / 1000
        self._timer = time_ms, self._call_later(delay_s, handle_timeout)

    def wake_free_queues(self) -> None:
        """Call `wake` for each queue whose messages have become visible again.

        Only queues whose wake-up is due are examined. If a queue cannot be popped yet, its wake-up
        is scheduled again. A queue without a known pop, or whose messages are all acknowledged, is
        not woken. At the end, the timer is set for the next wake-up.
        """
        now_ms = self._clock.now_ms()
        while self._wakeups and self._wakeups[0][0] <= now_ms:
            time_ms, key = heapq.heappop(self._wakeups)
            is_replaced_by_earlier = self._wakeup_of.get(key) != time_ms
            if is_replaced_by_earlier:
                continue
            del self._wakeup_of[key]
            name, queue_id = key
            last_pop = self.table.get(name, {}).get(queue_id)
            if last_pop is None:
                continue
            free_ms = find_free_ms(last_pop)
            if free_ms > now_ms:
                self._schedule_wakeup(key, free_ms)
            elif free_ms:  # 0 if all messages are acknowledged: `acknowledge` has woken the queue
                topic = name.partition(SEPARATOR)[0]
                self._wake(topic, queue_id)
        self._set_timer()

    def stop(self) -> None:
        """Cancel the timer, and set no other one."""
        self._call_later = None
        if self._timer is not None:
            self._timer[1].cancel()
            self._timer = None


def _count_deliveries(
    last_pop: OrderInfo, offsets: Sequence[int], attempt_id: str | None
) -> Mapping[int, int]:
    """Return how often the messages at `offsets` were delivered before, by offset.

    The result has only messages that `last_pop` took as well. If `last_pop` had the same
    `attempt_id`, its own counts are returned.
    """
    last_counts = last_pop.counts or {}
    if attempt_id and attempt_id == last_pop.attempt_id:
        return last_counts
    last_offsets = {*last_pop.offsets}
    return {offset: last_counts.get(offset, 0) + 1 for offset in offsets if offset in last_offsets}


def find_invisible_until_ms(last_pop: OrderInfo) -> dict[int, int]:
    """Return when each unacknowledged message of a pop can be delivered again, by offset.

    The offsets are ascending. The times are in ms since 1970, and may have passed already.
    """
    default_until_ms = last_pop.pop_ms + last_pop.invisible_ms
    return {
        offset: last_pop.visible_ms.get(offset, default_until_ms)
        for index, offset in enumerate(last_pop.offsets)
        if not last_pop.done >> index & 1  # the bit of a message is 1 if it is acknowledged
    }


def find_free_ms(last_pop: OrderInfo) -> int:
    """Return when a queue is free whose last pop is `last_pop`, in ms since 1970.

    That is when all messages of the pop that are not acknowledged are visible. Return 0 if all are
    acknowledged.
    """
    return max(find_invisible_until_ms(last_pop).values(), default=0)
