"""Transactions: half messages and their ends, in the log and in memory.

    send with TRAN_MSG  ->  half, hidden   ->  37 commit    ->  the message, at last
                                 |             37 rollback  ->  nothing
                                 +- undecided for too long: a client of the group is asked (39)

State follows from the half and the op queue as they can be seen (`undecided.py`), at the start and
while running alike. An end is a message (of a commit) and an op, next to each other in the log
(`halves.py`), written at once and not gathered for seconds as RocketMQ does: an op that was lost in
a crash would let a finished transaction be checked, and committed, once more. When a turn fails,
nothing of it was: `_turn_failed` takes back what was expected of it.

A second end of a transaction has no effect, whatever half of it it names: never two messages. What
may happen twice all the same stands in docs/transactions.md. Requests are answered in `ending.py`,
half messages made in `preparing.py`, what time demands is done in `transaction_checks.py`.

How far the two queues are done is kept as the offsets of CID_RMQ_SYS_TRANS, as RocketMQ does, and
only as far as the disk has it: a start reads from there on.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from sluicemq.broker.offsets import Offsets
from sluicemq.broker.produce.intake import Draft, Intake, RefusalError
from sluicemq.broker.produce.redelivery import Record
from sluicemq.broker.progress import Progress
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import HALF_TOPIC, LIMIT_TOPIC, OP_TOPIC, Topics
from sluicemq.broker.transactions.checkback import CheckBack
from sluicemq.broker.transactions.open import Undecided, UndecidedTable
from sluicemq.broker.transactions.prepared import (
    CHECK_TIMES,
    FIRST_OFFSET,
    GROUP,
    OP_PROPERTIES,
    OP_TAG_CODE,
    REAL_QUEUE,
    Half,
    HalfReader,
    op_body,
    properties_of,
)
from sluicemq.broker.transactions.rewrite import Preparing
from sluicemq.broker.turns import Turns
from sluicemq.clock import Clock
from sluicemq.errors import StoreError
from sluicemq.model.ids import Host, encode_host
from sluicemq.model.message import COMMITTED, REAL_TOPIC, ROLLED_BACK, TRANSACTION_MASK
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

GIVEN_UP: Final = -1
OUTCOMES: Final = {COMMITTED: "committed", ROLLED_BACK: "rolled back", GIVEN_UP: "given up"}
REMEMBERED: Final = 10_000


class Transactions:
    """All transactions of a broker. `on_done` hears of each half that is done, by its offset."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        offsets: Offsets,
        store: Store,
        intake: Intake,
        turns: Turns,
        clock: Clock,
        host: Host,
        check_back: CheckBack,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._offsets = offsets
        self._store = store
        self._intake = intake
        self._turns = turns
        self._clock = clock
        self._host = encode_host(host)
        self.check_back = check_back
        self.reader = HalfReader(store)
        self._preparing = Preparing(settings, intake)
        self.table = self._preparing.table
        self._half_progress = Progress(0)
        self._op_progress = Progress(0)
        self.is_on = False
        self._owed: list[int] = []
        self._turn = -1
        self._in_turn: list[Callable[[], None]] = []
        self._decided: OrderedDict[tuple[str, int], int] = OrderedDict()
        self.on_done: Callable[[int], None] = lambda offset: None
        self.committed: dict[str, int] = {}
        self.rolled_back: dict[str, int] = {}
        turns.on_failed.append(self._turn_failed)

    def move(self, host: Host) -> None:
        """The host that stands in ops is this one."""
        self._host = encode_host(host)

    # ------------------------------------------------------------------------------ the start

    def load(self) -> None:
        """Blocking: read what is open, and write the op that a crash has cut off."""
        half_start, op_start = self._start_of(HALF_TOPIC), self._start_of(OP_TOPIC)
        table = self.table = self._preparing.table = UndecidedTable(half_start, op_start)
        self._half_progress, self._op_progress = Progress(half_start), Progress(op_start)
        done: set[int] = set()
        for offset, halves in self.reader.ops(op_start):
            table.op(offset, halves)
            done.update(half for half in halves if half >= half_start)
        # All of them, then the ends: a half that is done may supersede one whose own op was lost.
        for half in self.reader.halves(half_start):
            self._add(half)
        for offset in done:
            table.close(offset)
        self._owed = [offset for offset in self._owed if offset not in done]
        table.half_next = self.reader.end(HALF_TOPIC)
        table.op_next = self.reader.end(OP_TOPIC)
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
        topic, sys_flag, (unique_id, digest) = last
        found = self.table.find(unique_id, digest)
        is_end = sys_flag & TRANSACTION_MASK == COMMITTED or topic == LIMIT_TOPIC
        if found is None or not is_end:
            return
        log.info("transaction %s ended just before the broker did", unique_id)
        self._append_op(found.offset)
        self._store.commit()
        if self._settings.store.flush_sync:
            self._store.publish(self._store.sync())
        self._follow()

    # ---------------------------------------------------------------------------------- the end

    def outcome_of(self, half: Half) -> int | None:
        """How a transaction ended lately; None when that is not known any more."""
        return self._decided.get((half.unique_id, half.digest))

    def decide(self, transaction: Undecided, outcome: int) -> None:
        """Commit or roll back one that is open and not ending.

        Raises RefusalError, StoreError; then it stays open.
        """
        record = self.reader.record(transaction.physical_offset)
        if record is None:
            raise RefusalError(ResponseCode.SYSTEM_ERROR, "its half message is deleted.")
        properties = properties_of(record)
        topic = properties.get(REAL_TOPIC, "")
        if outcome == COMMITTED:
            self._put_message(transaction, record, properties)
        self.end(transaction, outcome)
        counts = self.committed if outcome == COMMITTED else self.rolled_back
        counts[topic] = counts.get(topic, 0) + 1

    def _put_message(
        self, transaction: Undecided, record: Record, properties: dict[str, str]
    ) -> None:
        name, queue = properties.get(REAL_TOPIC, ""), properties.get(REAL_QUEUE, "")
        topic = self._topics.get(name)
        if topic is None or topic.is_forbidden or not queue.isdigit():
            raise RefusalError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"the message cannot be committed: topic[{name}] not exist. Create it again; the "
                "transaction stays undecided meanwhile.",
            )
        draft = _draft(record, name, int(queue), properties)
        draft.sys_flag |= COMMITTED
        draft.prepared_offset = transaction.physical_offset
        stored = self._intake.accept(draft)
        topic.messages_in += 1
        topic.bytes_in += len(record.body) + stored.properties_bytes + topic.record_bytes

    def put_aside(self, record: Record, properties: dict[str, str]) -> None:
        """Keep the message of a transaction that is given up. Raises StoreError."""
        self._topics.ensure(LIMIT_TOPIC, 1)
        self._intake.append(_draft(record, LIMIT_TOPIC, 0, properties))

    def end(self, transaction: Undecided, outcome: int) -> None:
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
        now_ms = self._clock.now_ms()
        self._store.writer.append(
            OP_TOPIC, 0, op_body(offset), OP_PROPERTIES, OP_TAG_CODE, 0, 0, now_ms, self._host,
            self._host,
        )  # fmt: skip

    def copy(self, transaction: Undecided, record: Record, checks: int) -> None:
        """The half once more, at the end of its queue; asked about when it can be seen, if it has
        one check more. Raises StoreError."""
        properties = properties_of(record)
        if checks:
            properties[CHECK_TIMES] = str(checks)
        properties[FIRST_OFFSET] = str(transaction.first_offset)
        stored = self._intake.append(_draft(record, HALF_TOPIC, 0, properties))
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
        """Halves first: what ends now may have begun just now."""
        table = self.table
        for half in self.reader.halves(table.half_next):
            transaction = self._add(half)
            if transaction.wants_check and transaction.copy_offset is None:
                transaction.wants_check = False
                if not transaction.is_ending:
                    self._ask(transaction)
        for offset, halves in self.reader.ops(table.op_next):
            table.op(offset, halves)
            for half_offset in halves:
                self.on_done(half_offset)
        self.pay()

    def _add(self, half: Half) -> Undecided:
        transaction, old_offset = self.table.half(half)
        if old_offset is not None:
            self._owed.append(old_offset)
        is_own_copy = transaction.copy_offset == half.offset
        if is_own_copy:
            transaction.copy_offset = None
        if is_own_copy and not transaction.wants_check:
            due_ms = transaction.due_ms  # carried, not checked
        elif half.checks:
            due_ms = half.stored_ms + self.interval_ms
        else:
            wait_ms = half.immunity_ms
            if wait_ms is None:
                wait_ms = self._settings.broker.transaction_timeout_ms
            due_ms = half.began_ms + wait_ms
        self.table.plan(transaction, due_ms)
        return transaction

    def _ask(self, transaction: Undecided) -> None:
        record = self.reader.record(transaction.physical_offset)
        if record is not None:
            self.check_back.ask(transaction, record)

    def pay(self) -> None:
        """Ops for the halves that newer ones of their transactions have superseded."""
        owed, self._owed = self._owed, []
        if not owed:
            return
        try:
            for offset in owed:
                self._append_op(offset)
        except StoreError as error:
            self._owed += owed
            log.warning("superseded half messages are marked later: %s", error)
            return
        self._expect(lambda: self._owed.extend(owed))

    # ------------------------------------------------------------------------------ how far it is

    @property
    def interval_ms(self) -> int:
        """Between two checks of a transaction."""
        return self._settings.broker.transaction_check_interval_ms

    def note_progress(self) -> None:
        """Hand on how far the queues are done, as far as that is safe."""
        table, end = self.table, self._store.written_offset
        half_low = table.half_low
        op_low = table.op_low(half_low)
        if (half_low, op_low) != (self._half_progress.value, self._op_progress.value):
            self._half_progress.advance(half_low, end)
            self._op_progress.advance(op_low, end)
        synced = self._store.synced_offset
        for topic, progress in ((HALF_TOPIC, self._half_progress), (OP_TOPIC, self._op_progress)):
            safe = progress.safe(synced)
            if safe > max(self._offsets.committed(GROUP, topic, 0), 0):
                self._offsets.commit(GROUP, topic, 0, safe)


def _draft(record: Record, topic: str, queue_id: int, properties: dict[str, str]) -> Draft:
    """The message of a half, for another place."""
    return Draft(
        topic, queue_id, record.body, properties, record.born_time_ms, record.born_host,
        record.store_host, record.flag, record.sys_flag & ~TRANSACTION_MASK,
        record.reconsume_times,
    )  # fmt: skip
