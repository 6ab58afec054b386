"""Transactions: prepared messages and their ends, in the log and in memory.

    send with TRAN_MSG  ->  prepared, hidden  ->  37 commit    ->  the message, at last
                                              |   37 rollback  ->  nothing
                                              +-  open for too long: a client is asked (39)

State follows from the half and the op queue as they can be seen (`open.py`), at the start and while
running alike. An end is a message (of a commit) and an op, next to each other in the log
(`prepared.py`), written at once and not gathered for seconds as RocketMQ does: an op that was lost
in a crash would let a finished transaction be checked, and committed, once more. When a turn fails,
nothing of it was: what was expected of it is undone.

A second end of a transaction has no effect, whatever message of it it names: never two messages.
What may happen twice all the same is in docs/transactions.md. Requests are answered in
`requests.py`, what time demands is done in `checks.py`.

How far the two queues are done is kept as the offsets of CID_RMQ_SYS_TRANS, as RocketMQ does, and
only as far as the disk has it: a start reads from there on.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from sluicemq.broker.offsets import Offsets
from sluicemq.broker.produce.intake import Intake
from sluicemq.broker.produce.redelivery import Record
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import HALF_TOPIC, LIMIT_TOPIC, OP_TOPIC, Topics
from sluicemq.broker.transactions.checkback import CheckBack
from sluicemq.broker.transactions.open import OpenTransaction, OpenTransactions, Prepared
from sluicemq.broker.transactions.prepared import (
    CHECK_TIMES,
    FIRST_OFFSET,
    GROUP,
    OP_PROPERTIES,
    OP_TAG_CODE,
    REAL_QUEUE,
    PreparedReader,
    Preparing,
    draft_of,
    identity,
    op_body,
    properties_of,
)
from sluicemq.broker.turns import Turns
from sluicemq.broker.work import Progress
from sluicemq.clock import Clock
from sluicemq.errors import RequestError, StoreError
from sluicemq.model.message import COMMITTED, REAL_TOPIC, ROLLED_BACK, TRANSACTION_MASK
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

GIVEN_UP: Final = -1
OUTCOMES: Final = {COMMITTED: "committed", ROLLED_BACK: "rolled back", GIVEN_UP: "given up"}
REMEMBERED: Final = 10_000


class Transactions:
    """All transactions of a broker. `on_done` is told the offset of each prepared message that is
    done."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        offsets: Offsets,
        store: Store,
        intake: Intake,
        turns: Turns,
        clock: Clock,
        check_back: CheckBack,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._offsets = offsets
        self._store = store
        self._intake = intake
        self._turns = turns
        self._clock = clock
        self.check_back = check_back
        self.reader = PreparedReader(store)
        self._preparing = Preparing(settings, intake)
        self.table = self._preparing.table
        self._progress = {HALF_TOPIC: Progress(0), OP_TOPIC: Progress(0)}
        self.is_on = False
        self._superseded: list[int] = []
        self._turn = -1
        self._in_turn: list[Callable[[], None]] = []
        self._decided: OrderedDict[tuple[str, int], int] = OrderedDict()
        self.on_done: Callable[[int], None] = lambda offset: None
        self.committed: dict[str, int] = {}
        self.rolled_back: dict[str, int] = {}
        turns.on_failed.append(self._turn_failed)

    # ------------------------------------------------------------------------------ the start

    def load(self) -> None:
        """Blocking: read what is open, and write the op that a crash has cut off."""
        half_start, op_start = self._start_of(HALF_TOPIC), self._start_of(OP_TOPIC)
        table = self.table = self._preparing.table = OpenTransactions(half_start, op_start)
        self._progress = {HALF_TOPIC: Progress(half_start), OP_TOPIC: Progress(op_start)}
        done: set[int] = set()
        for offset, offsets in self.reader.ops(op_start):
            table.op(offset, offsets)
            done.update(one for one in offsets if one >= half_start)
        # All of them, then the ends: one that is done may supersede one whose own op was lost.
        for message in self.reader.prepared(half_start):
            self._add(message)
        for offset in done:
            table.close(offset)
        self._superseded = [offset for offset in self._superseded if offset not in done]
        table.half_next = self._store.queue_offsets(HALF_TOPIC, 0)[1]
        table.op_next = self._store.queue_offsets(OP_TOPIC, 0)[1]
        if self._settings.is_read_only:
            return
        self._end_last()
        self.is_on = True
        if len(table):
            log.info("%d transactions are undecided", len(table))

    def _start_of(self, topic: str) -> int:
        start, end = self._store.queue_offsets(topic, 0)
        known = self._offsets.committed(GROUP, topic, 0)
        if known > end:
            log.error(
                "the offset %d of %s is behind its end %d: it begins there", known, topic, end
            )
        return min(max(known, start), end)

    def _end_last(self) -> None:
        """The last record of the log is a message whose op is missing: write it."""
        last = self.reader.last()
        if last is None:
            return
        is_end = last.sys_flag & TRANSACTION_MASK == COMMITTED or last.topic == LIMIT_TOPIC
        found = self.table.find(*identity(last)) if is_end else None
        if found is None:
            return
        log.info("transaction %s ended just before the broker did", found.unique_id)
        self._append_op(found.offset)
        self._store.commit()
        if self._settings.store.flush_sync:
            self._store.publish(self._store.sync())
        self._follow()

    # ---------------------------------------------------------------------------------- the end

    def outcome_of(self, message: Prepared) -> int | None:
        """How a transaction ended lately; None when that is not known any more."""
        return self._decided.get((message.unique_id, message.digest))

    def decide(self, transaction: OpenTransaction, outcome: int) -> None:
        """Commit or roll back one that is open and not ending.

        Raises RequestError, StoreError; then it stays open.
        """
        record = self.reader.record(transaction.physical_offset)
        if record is None:
            raise RequestError(ResponseCode.SYSTEM_ERROR, "its half message is deleted.")
        properties = properties_of(record)
        name = properties.get(REAL_TOPIC, "")
        if outcome == COMMITTED:
            self._put_message(transaction, record, properties, name)
        self.end(transaction, outcome)
        counts = self.committed if outcome == COMMITTED else self.rolled_back
        counts[name] = counts.get(name, 0) + 1

    def _put_message(
        self, transaction: OpenTransaction, record: Record, properties: dict[str, str], name: str
    ) -> None:
        topic, queue_id = self._topics.get(name), properties.get(REAL_QUEUE, "")
        if topic is None or topic.is_forbidden or not queue_id.isdigit():
            raise RequestError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"the message cannot be committed: topic[{name}] not exist. Create it again; the "
                "transaction stays undecided meanwhile.",
            )
        draft = draft_of(record, name, int(queue_id), properties)
        draft.sys_flag |= COMMITTED
        draft.prepared_offset = transaction.physical_offset
        stored = self._intake.accept(draft)
        topic.messages_in += 1
        topic.bytes_in += len(record.body) + stored.properties_bytes + topic.record_bytes

    def put_aside(self, record: Record, properties: dict[str, str]) -> None:
        """Keep the message of a transaction that is given up. Raises StoreError."""
        self._topics.ensure(LIMIT_TOPIC, 1)
        self._intake.append(draft_of(record, LIMIT_TOPIC, 0, properties))

    def end(self, transaction: OpenTransaction, outcome: int) -> None:
        """Write the op, right behind the message if there is one."""
        newest = transaction.copy_offset
        self._append_op(transaction.offset if newest is None else newest)
        transaction.is_ending = True
        key = (transaction.unique_id, transaction.digest)
        self._decided[key] = outcome
        if len(self._decided) > REMEMBERED:
            self._decided.popitem(last=False)

        def undo() -> None:
            transaction.is_ending = False
            self._decided.pop(key, None)
            self.table.plan(transaction, self._clock.now_ms() + self.interval_ms)

        self._expect(undo)

    def _append_op(self, offset: int) -> None:
        now_ms, host = self._clock.now_ms(), self._settings.store_host
        self._store.writer.append(
            OP_TOPIC, 0, op_body(offset), OP_PROPERTIES, OP_TAG_CODE, 0, 0, now_ms, host, host
        )

    def copy(self, transaction: OpenTransaction, record: Record, checks: int) -> None:
        """The message once more, at the end of its queue; asked about when it can be seen, if it
        has one check more. Raises StoreError."""
        properties = properties_of(record)
        if checks:
            properties[CHECK_TIMES] = str(checks)
        properties[FIRST_OFFSET] = str(transaction.first_offset)
        stored = self._intake.append(draft_of(record, HALF_TOPIC, 0, properties))
        transaction.copy_offset = stored.queue_offset
        transaction.wants_check = checks > transaction.checks

        def undo() -> None:
            transaction.copy_offset = None
            transaction.wants_check = False

        self._expect(undo)

    def _expect(self, undo: Callable[[], None]) -> None:
        """The turn has something of ours; `undo` is called when it fails."""
        if self._turn != self._turns.turns:
            self._turn = self._turns.turns
            self._in_turn.clear()
        self._in_turn.append(undo)
        self._turns.own()

    def _turn_failed(self) -> None:
        if self._turn == self._turns.turns - 1:
            undos, self._in_turn = self._in_turn, []
            for undo in undos:
                undo()

    # -------------------------------------------------------------------- what has become visible

    def arrived(self) -> None:
        """One of the two queues has grown."""
        if self.is_on:
            self._follow()

    def _follow(self) -> None:
        """Prepared messages first: what ends now may have begun just now."""
        table = self.table
        for message in self.reader.prepared(table.half_next):
            transaction = self._add(message)
            if transaction.wants_check and transaction.copy_offset is None:
                transaction.wants_check = False
                record = self.reader.record(transaction.physical_offset)
                if record is not None and not transaction.is_ending:
                    self.check_back.ask(transaction, record)
        for offset, offsets in self.reader.ops(table.op_next):
            table.op(offset, offsets)
            for done in offsets:
                self.on_done(done)
        self.mark_superseded()

    def _add(self, message: Prepared) -> OpenTransaction:
        transaction, old_offset = self.table.add(message)
        if old_offset is not None:
            self._superseded.append(old_offset)
        is_own_copy = transaction.copy_offset == message.offset
        if is_own_copy:
            transaction.copy_offset = None
        if is_own_copy and not transaction.wants_check:
            due_ms = transaction.due_ms  # carried, not checked
        elif message.checks:
            due_ms = message.stored_ms + self.interval_ms
        else:
            wait_ms = message.immunity_ms
            if wait_ms is None:
                wait_ms = self._settings.broker.transaction_timeout_ms
            due_ms = message.began_ms + wait_ms
        self.table.plan(transaction, due_ms)
        return transaction

    def mark_superseded(self) -> None:
        """Ops for the messages that newer ones of their transactions have superseded."""
        offsets, self._superseded = self._superseded, []
        if not offsets:
            return
        try:
            for offset in offsets:
                self._append_op(offset)
        except StoreError as error:
            self._superseded += offsets
            log.warning("superseded half messages are marked later: %s", error)
            return
        self._expect(lambda: self._superseded.extend(offsets))

    # ------------------------------------------------------------------------------ how far it is

    @property
    def interval_ms(self) -> int:
        """Between two checks of a transaction."""
        return self._settings.broker.transaction_check_interval_ms

    def note_progress(self) -> None:
        """Hand on how far the queues are done, as far as that is safe."""
        half_low = self.table.half_low
        low = {HALF_TOPIC: half_low, OP_TOPIC: self.table.op_low(half_low)}
        has_moved = any(progress.value != low[name] for name, progress in self._progress.items())
        for topic, progress in self._progress.items():
            if has_moved:
                progress.advance(low[topic], self._store.written_offset)
            safe = progress.safe(self._store.synced_offset)
            if safe > max(self._offsets.committed(GROUP, topic, 0), 0):
                self._offsets.commit(GROUP, topic, 0, safe)
