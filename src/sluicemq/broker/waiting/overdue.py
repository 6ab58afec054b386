"""The timed messages that were due before a start and may have been delivered before it.

A start may not know what the broker delivered before it stopped. Then a message that was due at the
start is *overdue*: it waits here until the commit log has been searched for its delivery
(`store.timers.overdue`). `Timers` delivers the messages that the search does not find.
"""

from collections.abc import Generator
from typing import Final

from sluicemq.broker.background import TimeSlice
from sluicemq.broker.produce.intake import DueMessageDelivery, QueueEntry, Record
from sluicemq.broker.waiting.timed_records import target_topic
from sluicemq.record.codec import find_property
from sluicemq.store.store import Store
from sluicemq.store.timers.files import MAGIC_DELETE, MAGIC_ROLL
from sluicemq.store.timers.overdue import DeliveryLookup, OverdueMessage
from sluicemq.store.timers.placing import TIMER_DELETES_KEY, recall_key

SEARCH_STEP_COST: Final = 64
"""What one step of a search counts in a time slice, in messages."""


class OverdueMessages:
    """The overdue messages of a broker, and the search for their deliveries.

    At first no message is overdue; `begin` is called at the start and before a rebuild.
    """

    def __init__(self, store: Store, redelivery: DueMessageDelivery) -> None:
        """Create an empty set of overdue messages.

        `redelivery` has the gates of topics. A gate is a function that knows which messages of a
        topic were delivered elsewhere, and drops these.
        """
        self._store = store
        self._redelivery = redelivery
        self._lookup: DeliveryLookup | None = None
        """The messages that wait for a search; None if it is known what was delivered."""
        self._search: Generator[None, None, list[OverdueMessage]] | None = None
        """The search that runs; None if there is none."""
        self._due_until_ms = 0
        """A message that is due later is not overdue."""
        self._log_end = 0
        """A message at this position of the log or behind it is not overdue."""
        self._recalled_keys: set[bytes] = set()
        """The keys of messages that were recalled by a marker among the overdue messages."""

    def begin(self, now_ms: int) -> None:
        """Treat each message that is stored and due at `now_ms` as maybe delivered already.

        `now_ms` is the present time. Messages that waited for a search before are forgotten.
        """
        self._due_until_ms = now_ms
        self._log_end = self._store.written_offset
        self._lookup = DeliveryLookup(self._store, self._log_end)
        self._search = None
        self._recalled_keys = set()

    def end(self) -> None:
        """Treat no message as overdue: what was delivered is known."""
        self._lookup = None

    @property
    def has_waiting(self) -> bool:
        """Whether overdue messages wait until their delivery has been searched."""
        waiting_count = self._lookup.waiting_count if self._lookup is not None else 0
        return waiting_count > 0 or self._search is not None

    def may_contain(self, slot_ms: int) -> bool:
        """Return whether messages of a slot may be overdue."""
        return self._lookup is not None and slot_ms <= self._due_until_ms

    def defer(self, record: Record, message: OverdueMessage, floor: int) -> bool:
        """Keep a message until the log was searched, if it may have been delivered already.

        Return whether the message was kept. It is not kept if it is due or was stored after the
        start, or if its topic has a gate, which knows itself which messages were delivered.
        `floor` is the position in the log before which its delivery cannot be.
        """
        lookup = self._lookup
        if lookup is None or message.due_ms > self._due_until_ms:
            return False
        if message.position >= self._log_end or target_topic(record) in self._redelivery.gates:
            return False
        lookup.add(record, message, floor, is_roll=bool(message.magic & MAGIC_ROLL))
        return True

    def defer_without_unit(
        self, entry: QueueEntry, record: Record, slot_ms: int, magic: int
    ) -> bool:
        """Handle a message that has no unit in the wheel and whose slot is over.

        The message was stored before this start of the broker. Return False if the caller must add
        it to the wheel, to deliver it late. Return True in these cases:

        - It is a recall marker. Its key is kept for `is_recalled`.
        - It may have been delivered already. It is kept until the log was searched.
        - The gate of its topic says that it must not be delivered.
        """
        if self._lookup is None or entry.position >= self._log_end:
            return False
        is_recall_marker = magic & MAGIC_DELETE and not magic & MAGIC_ROLL
        if is_recall_marker:
            self._recalled_keys.add(find_property(record.properties, TIMER_DELETES_KEY) or b"")
            return True
        gate = self._redelivery.gates.get(target_topic(record))
        if gate is not None:
            return gate(record) is None
        message = OverdueMessage(entry.position, slot_ms, slot_ms + 1, magic, has_unit=False)
        return self.defer(record, message, entry.position)

    def is_recalled(self, record: Record) -> bool:
        """Return whether a recall marker of `defer_without_unit` recalls the message."""
        return recall_key(record.properties) in self._recalled_keys

    def can_search(self, *, is_complete: bool) -> bool:
        """Return whether a search of the log is running, or can be started now.

        `is_complete` says that all timed messages are indexed and loaded. Before that, a search can
        be started only if the maximum number of messages wait for it.
        """
        if self._search is not None:
            return True
        if self._lookup is None or not self._lookup.waiting_count:
            return False
        return is_complete or self._lookup.is_full

    def search(self, work: TimeSlice) -> list[OverdueMessage]:
        """Search the log for deliveries of the overdue messages, until the slice `work` is over.

        Call it only if `can_search` returns True. The next call continues the search. When the
        search has ended, return the messages without a delivery in the log. Until then, return [].
        """
        if self._search is None:
            assert self._lookup is not None, "can_search is False without a look-up"
            self._search = self._lookup.find_undelivered()
        try:
            while not work.is_over:
                next(self._search)
                work.count_done(SEARCH_STEP_COST)
        except StopIteration as search_end:
            self._search = None
            undelivered: list[OverdueMessage] = search_end.value
            return undelivered
        return []
