"""Transactions: prepared messages and their ends, in the log and in memory.

    send with TRAN_MSG  ->  prepared, hidden  ->  END_TRANSACTION, commit    ->  a visible message
                                              |   END_TRANSACTION, rollback  ->  nothing
                                              +-  open for too long: the broker checks it

The state follows from the visible part of the half queue and the op queue (`prepared.py`), at the
start and while running alike. A commit appends the message and its op next to each other in the
log. The op is written at once, not gathered for seconds as in RocketMQ: an op that a crash loses
would let a finished transaction be checked, and committed, again. If a group commit fails, nothing
of it is stored, so the changes of the table that it was to cause are undone.

A second end of a transaction has no effect, whichever of its prepared messages it names, so that a
transaction is never committed twice. The documentation of transactions lists the exceptions.
`requests.py` handles the requests.

The offsets up to which the two queues are done are saved as committed offsets of CID_RMQ_SYS_TRANS,
as in RocketMQ, and only as far as the log is on disk. A start reads from there.

Work that depends on time is done in slices (`run_slice`), which a background job of the broker
calls. A transaction that has been open for long enough is *due*. It is checked: a copy of its
message with one more check is appended, and when the copy is visible, a client of the producer
group is asked (CHECK_TRANSACTION_STATE, 39). A check counts only if a client was there to be asked;
RocketMQ counts in any case, and after some minutes drops messages for which no producer could
answer. If no client is connected, the check waits (`WaitingChecks`) until one connects. A
transaction that was checked transactionCheckMax times, or that is older than the log is
kept, is *abandoned*: its message goes to TRANS_CHECK_MAX_TIME_TOPIC, and the broker logs it, counts
it and calls the hooks.

A prepared message that is far behind the end of its queue is *carried forward*: a copy of it is
appended. Otherwise every start would have to read all messages after an old transaction, and
retention would delete the file of its message.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice, takewhile
from typing import Final, NamedTuple

from sluicemq.broker.background import Progress, TimeSlice
from sluicemq.broker.context import BrokerContext
from sluicemq.broker.produce.intake import MessageIntake, MessageToStore, Record
from sluicemq.broker.transactions.checks import TransactionChecker, WaitingChecks
from sluicemq.broker.transactions.prepared import (
    CHECK_TIMES,
    COPY_BYTES_MAX,
    FIRST_OFFSET,
    OP_PROPERTIES,
    OP_TAG_CODE,
    OpenTransaction,
    OpenTransactions,
    PreparedMessage,
    PreparedReader,
    convert_to_prepared,
    copy_prepared_to,
    original_properties,
    transaction_identity,
)
from sluicemq.errors import RequestError, StoreError
from sluicemq.model.message import (
    COMMITTED,
    PRODUCER_GROUP,
    REAL_QUEUE,
    REAL_TOPIC,
    ROLLED_BACK,
    TRANSACTION_MASK,
    UNIQ_KEY,
)
from sluicemq.model.system_names import CHECK_MAX_TOPIC, HALF_TOPIC, OP_TOPIC, TRANSACTION_GROUP
from sluicemq.numbers import natural
from sluicemq.record.codec import format_property_text
from sluicemq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

ABANDONED: Final = -1
"""The outcome of a transaction that no producer has decided. It is used only in memory."""

OUTCOMES: Final = {COMMITTED: "committed", ROLLED_BACK: "rolled back", ABANDONED: "abandoned"}

OUTCOMES_MAX: Final = 4096
"""The number of outcomes of ended transactions that are remembered."""

SLICE_S: Final = 0.004
"""The time limit of one slice, in seconds."""

SLICE_TRANSACTIONS: Final = 1024
"""The number of transactions that one slice processes at most."""

WINDOW_MESSAGES: Final = 20_000
"""The number of messages of the half queue that a start reads at most. It is larger if more than a
quarter of them are open."""

_HOUR_MS: Final = 3_600_000


class AbandonedTransaction(NamedTuple):
    """A transaction that no producer has decided. Its message is in TRANS_CHECK_MAX_TIME_TOPIC."""

    unique_id: str
    group: str
    """The producer group."""
    topic: str
    """The topic to which a commit would have moved the message."""
    check_count: int
    age_ms: int
    """The time from the first prepared message to the end."""


class Transactions:
    """All transactions of a broker: the open ones, and the outcomes of those that ended lately."""

    def __init__(
        self,
        context: BrokerContext,
        *,
        intake: MessageIntake,
        checker: TransactionChecker,
    ) -> None:
        """Create the component without any open transaction. Call `load` before the first request.

        `intake` will redirect messages of transactions to the half topic, where no consumer sees
        them. `checker` asks producers how their transactions ended.
        """
        settings = context.settings
        self._settings = settings
        self._topics = context.topics
        self._offsets = context.offsets
        self._store = context.store
        self._intake = intake
        self._group_commit = context.group_commit
        self._clock = context.clock
        self._steady = context.steady_clock
        self.checker = checker
        self._waiting_checks = WaitingChecks()
        self.reader = PreparedReader(context.store)
        self.table = OpenTransactions(0, 0)
        self._progress = {HALF_TOPIC: Progress(0), OP_TOPIC: Progress(0)}
        """By topic: the offset before which all messages of the queue are done."""
        self.is_running = False
        """Whether transactions are checked: from `load` to `stop`, but not if read-only."""
        self._superseded: list[int] = []
        """Offsets of superseded prepared messages whose ops have not been appended."""
        self._outcomes: OrderedDict[tuple[str, int], int] = OrderedDict()
        """Outcomes of ended transactions by id and digest, the oldest first."""
        self._abandoned: dict[int, AbandonedTransaction] = {}
        """Abandoned transactions whose op is not visible yet, by the offset in that op."""
        self._logged_error = ""
        self.on_given_up: list[Callable[[AbandonedTransaction], None]] = []
        """Hooks, called with each abandoned transaction once its end is visible."""
        self.committed: dict[str, int] = {}
        """The number of committed transactions by topic."""
        self.rolled_back: dict[str, int] = {}
        """The number of rolled back transactions by topic."""
        self.abandoned_count = 0
        self.lost_count = 0
        """The number of messages that were deleted before their transactions were decided."""

        # This rewrite comes before that of delays: a message of a transaction cannot be delayed.
        intake.rewrites.insert(0, self._rewrite_prepared)

    def _rewrite_prepared(self, message: MessageToStore) -> None:
        """Redirect `message` to the half topic if it begins a transaction.

        Raises RequestError if it may not begin one, or if its properties are too large.
        """
        if convert_to_prepared(message, self._settings.broker, len(self.table)):
            # Copies have more properties. They must not be refused when the original was accepted.
            properties_bytes = len(format_property_text(message.properties).encode())
            self._intake.check_properties_size(properties_bytes + COPY_BYTES_MAX)

    # ------------------------------------------------------------------------------ the start

    def load(self) -> None:
        """Fill the table of open transactions from the store. Blocking.

        An op is a message that marks a transaction as ended. It follows the message of the
        transaction. If a crash came between the two, the op is appended now.

        From now on, new messages in the half queue and the op queue update the table, and
        `run_slice` checks transactions. A read-only broker only fills the table. Raises StoreError.
        """
        half_start = self._start_offset(HALF_TOPIC)
        op_start = self._start_offset(OP_TOPIC)
        table = self.table = OpenTransactions(half_start, op_start)
        self._waiting_checks = WaitingChecks()
        self._progress = {HALF_TOPIC: Progress(half_start), OP_TOPIC: Progress(op_start)}
        self._fill_table(half_start, op_start)
        if self._settings.is_read_only:
            return

        self._complete_last_end()
        self._group_commit.topic_listeners |= {
            HALF_TOPIC: self._read_visible,
            OP_TOPIC: self._read_visible,
        }
        self.is_running = True
        if len(table):
            log.info("%d transactions are undecided", len(table))

    def _fill_table(self, half_start: int, op_start: int) -> None:
        """Add the messages and ops in the two queues to the table, from the given offsets on.

        Messages of transactions are in the half queue. Ops, in the op queue, list the transactions
        that have ended.
        """
        table = self.table
        done_offsets: set[int] = set()
        for op_offset, half_offsets in self.reader.iter_ops(op_start):
            table.add_op(op_offset, half_offsets)
            done_offsets.update(offset for offset in half_offsets if offset >= half_start)
        # First all messages, then their ends: a message that is done may supersede another one
        # whose own op was lost.
        for message in self.reader.iter_prepared(half_start):
            self._add_prepared(message)
        for offset in done_offsets:
            table.mark_done(offset)
        self._superseded = [offset for offset in self._superseded if offset not in done_offsets]
        _, table.next_half_offset = self._store.queue_offsets(HALF_TOPIC, 0)
        _, table.next_op_offset = self._store.queue_offsets(OP_TOPIC, 0)

    def _complete_last_end(self) -> None:
        """Append the missing op if the last record of the log ends an open transaction.

        An op is the message that says that a transaction has ended. It follows that record, so a
        crash may cut it off. The new op is stored before this method returns, and synced if the
        broker syncs each commit. Raises StoreError.
        """
        last_record = self.reader.read_last_record()
        if last_record is None:
            return
        is_commit = (last_record.sys_flag & TRANSACTION_MASK) == COMMITTED
        if not is_commit and last_record.topic != CHECK_MAX_TOPIC:
            return
        transaction = self.table.find(*transaction_identity(last_record))
        if transaction is not None:
            log.info("transaction %s ended just before the broker stopped", transaction.unique_id)
            self._append_op(transaction.offset)
            self._store.commit()
            if self._settings.store.flush_sync:
                self._store.publish(self._store.sync())
            self._read_visible()

    def _start_offset(self, topic: str) -> int:
        """Return the offset from which the queue of `topic` (half or op) is read at a start.

        It is the committed offset, limited to the offsets that the queue contains. If it is beyond
        the end of the queue, an error is logged. If this broker did not write the file of committed
        offsets last, the result is the start of the queue.
        """
        start, end = self._store.queue_offsets(topic, 0)
        if self._offsets.document.is_doubtful:
            # The queues contain all ops, so a read from their start shows what is open.
            return start
        committed = self._offsets.committed(TRANSACTION_GROUP, topic, 0)
        if committed > end:
            log.error(
                "offset %d of %s is greater than the end %d of its queue; reading from the end",
                committed,
                topic,
                end,
            )
        return min(max(committed, start), end)

    # ---------------------------------------------------------------------------------- the end

    def recent_outcome(self, message: PreparedMessage) -> int | None:
        """Return how the transaction of `message` ended: a key of OUTCOMES.

        Return None if it has not ended, or not recently.
        """
        return self._outcomes.get((message.unique_id, message.digest))

    def decide(self, transaction: OpenTransaction, outcome: int) -> None:
        """Commit or roll back a transaction that is open and not ending.

        `outcome` is COMMITTED or ROLLED_BACK. A commit appends the message to its topic, unless
        another master has delivered it. In both cases the op, which ends the transaction, is
        appended, and the end is counted by topic. The caller's answer must wait for the group
        commit.

        Raises RequestError if the message is deleted or its topic is missing, and StoreError. Then
        the transaction stays open.
        """
        record = self.reader.read_record(transaction.physical_offset)
        if record is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, "the half message of the transaction is deleted."
            )
        properties = original_properties(record)
        topic = properties.get(REAL_TOPIC, "")
        if outcome == COMMITTED:
            self._append_committed(transaction, record, properties)
        # Right after the message, so that a start can complete an end that a crash cuts off.
        self.append_end(transaction, outcome)
        counts = self.committed if outcome == COMMITTED else self.rolled_back
        counts[topic] = counts.get(topic, 0) + 1

    def _append_committed(
        self, transaction: OpenTransaction, record: Record, properties: dict[str, str]
    ) -> None:
        """Append the message of a transaction to its topic, and count it for the topic.

        `record` is the newest prepared message. `properties` are those of the original message, and
        are changed. Nothing is appended if another master has delivered the message. Raises
        RequestError if the topic is missing, and StoreError.
        """
        name = properties.get(REAL_TOPIC, "")
        topic = self._topics.get(name)
        queue_id = natural(properties.get(REAL_QUEUE, ""))
        if topic is None or topic.is_forbidden or queue_id is None:
            raise RequestError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"the message cannot be committed: topic[{name}] not exist. Create it again; "
                "the transaction stays undecided until then.",
            )
        message = copy_prepared_to(record, name, queue_id, properties)
        message.sys_flag |= COMMITTED
        message.prepared_offset = transaction.physical_offset
        if not self._intake.delivered_elsewhere.take(name, record.get_text(UNIQ_KEY)):
            stored = self._intake.rewrite_and_append(message)
            topic.messages_in += 1
            topic.bytes_in += len(record.body) + stored.properties_bytes + topic.record_bytes

    def append_end(self, transaction: OpenTransaction, outcome: int) -> None:
        """Append the op that ends a transaction, schedule its commit, and remember the outcome.

        An op is a message that lists the prepared messages of ended transactions. `outcome` is a
        key of OUTCOMES. For a committed or an abandoned transaction, the message itself must have
        been appended right before. Until the op is visible, the transaction counts as ending. If
        the group commit fails, it is open again, and is checked again after `interval_ms`.

        Raises StoreError.
        """
        # A copy that is not visible yet will represent the transaction when it becomes visible.
        offset = transaction.offset
        if transaction.copy_offset is not None:
            offset = transaction.copy_offset
        self._append_op(offset)
        self._waiting_checks.discard(transaction)
        transaction.is_ending = True
        key = (transaction.unique_id, transaction.digest)
        self._outcomes[key] = outcome
        if len(self._outcomes) > OUTCOMES_MAX:
            self._outcomes.popitem(last=False)

        def undo() -> None:
            transaction.is_ending = False
            self._outcomes.pop(key, None)
            self.table.schedule(transaction, self._steady.now_ms() + self.interval_ms)

        self._group_commit.commit_internal(undo)

    def _append_op(self, offset: int) -> None:
        """Append an op for the prepared message at `offset`. The caller schedules the commit."""
        now_ms = self._clock.now_ms()
        host = self._settings.store_host
        # Positional: the writer is a compiled function that is called for every message.
        self._store.writer.append(
            OP_TOPIC, 0, b"%d" % offset, OP_PROPERTIES, OP_TAG_CODE, 0, 0, now_ms, host, host
        )

    def append_copy(self, transaction: OpenTransaction, record: Record, check_count: int) -> None:
        """Append a copy of a transaction's message to the half queue, and schedule its commit.

        `record` is the newest prepared message. `check_count` is the number of checks that the copy
        records. If it is greater than before, a check is sent when the copy becomes visible. If the
        group commit fails, there is no copy, and no check is sent.

        Raises StoreError.
        """
        properties = original_properties(record)
        if check_count:
            properties[CHECK_TIMES] = str(check_count)
        properties[FIRST_OFFSET] = str(transaction.first_offset)
        stored = self._intake.append(copy_prepared_to(record, HALF_TOPIC, 0, properties))
        transaction.copy_offset = stored.queue_offset
        transaction.is_check_pending = check_count > transaction.check_count

        def undo() -> None:
            transaction.copy_offset = None
            transaction.is_check_pending = False

        self._group_commit.commit_internal(undo)

    # -------------------------------------------------------------------- what has become visible

    def _read_visible(self, _queue_id: int = 0) -> None:
        """Add the messages and ops that have become visible to the table.

        Ops are messages that list ended transactions. If a message is a copy that a check has
        waited for, the check is sent. If an op ends an abandoned transaction, that is reported. For
        each message that was replaced by a copy, an op is appended. The group commit calls this
        method with the queue id, which is always 0.
        """
        table = self.table
        # Messages first: the op of a transaction may become visible together with its message.
        for message in self.reader.iter_prepared(table.next_half_offset):
            transaction = self._add_prepared(message)
            self._send_pending_check(transaction)
        for op_offset, half_offsets in self.reader.iter_ops(table.next_op_offset):
            table.add_op(op_offset, half_offsets)
            for half_offset in half_offsets:
                abandoned = self._abandoned.pop(half_offset, None)
                if abandoned is not None:
                    self._report_abandoned(abandoned)
        self.append_ops_of_superseded()

    def _send_pending_check(self, transaction: OpenTransaction) -> None:
        """Send the pending check of a transaction, if the copy that it waits for is visible now.

        Before a check, a copy of the message that counts the check is stored. The check is not sent
        if the transaction is ending or its message is deleted.
        """
        is_copy_visible = transaction.copy_offset is None
        if not transaction.is_check_pending or not is_copy_visible:
            return
        transaction.is_check_pending = False
        record = self.reader.read_record(transaction.physical_offset)
        if record is not None and not transaction.is_ending:
            self.checker.send_check(transaction, record)

    def _add_prepared(self, message: PreparedMessage) -> OpenTransaction:
        """Add a visible prepared message to the table, and schedule the check of its transaction.

        - A new transaction is checked after the time that its message sets, or after
          `transaction_timeout_ms`.
        - After a check, the next one follows after `interval_ms`.
        - A copy that was appended only because the message is old does not change the time.

        The offset of a message that this one replaces is added to `_superseded`. Return the
        transaction.
        """
        transaction, superseded_offset = self.table.add(message)
        if superseded_offset is not None:
            self._superseded.append(superseded_offset)
        is_own_copy = transaction.copy_offset == message.offset
        if is_own_copy:
            transaction.copy_offset = None
        if is_own_copy and not transaction.is_check_pending:
            due_ms = transaction.due_ms  # The message was carried forward, not checked.
        elif message.check_count:
            due_ms = self._due_after(message.stored_ms, self.interval_ms)
        else:
            wait_ms = message.immunity_ms
            if wait_ms is None:
                wait_ms = self._settings.broker.transaction_timeout_ms
            due_ms = self._due_after(message.started_ms, wait_ms)
        self.table.schedule(transaction, due_ms)
        return transaction

    def _due_after(self, stored_ms: int, wait_ms: int) -> int:
        """Return the time of the steady clock that is `wait_ms` after a store time.

        A store time in the future was written before the wall clock was set back. Then the wait
        begins now.
        """
        age_ms = max(self._clock.now_ms() - stored_ms, 0)
        return self._steady.now_ms() - age_ms + wait_ms

    def append_ops_of_superseded(self) -> None:
        """Append ops for messages that were replaced by copies, and schedule their commit.

        An op marks a message of the half queue as done. If the store accepts no messages, which is
        logged, or if the group commit fails, the next call appends the ops again.
        """
        offsets = self._superseded
        self._superseded = []
        if not offsets:
            return
        try:
            for offset in offsets:
                self._append_op(offset)
        except StoreError as error:
            self._superseded += offsets
            log.warning("cannot mark superseded half messages as done, retrying: %s", error)
            return
        self._group_commit.commit_internal(lambda: self._superseded.extend(offsets))

    # -------------------------------------------------------------------------------- progress

    @property
    def interval_ms(self) -> int:
        """The time between two checks of a transaction (transactionCheckInterval)."""
        return self._settings.broker.transaction_check_interval_ms

    def commit_progress(self) -> None:
        """Commit the offsets from which the next start must read the half queue and the op queue.

        These are the offset of the first open transaction, and the offset of the first op that
        lists this or a later message. An offset is committed only when everything before it is
        synced to disk.
        """
        half_offset = self.table.lowest_half_offset
        lowest = {
            HALF_TOPIC: half_offset,
            OP_TOPIC: self.table.find_lowest_op_offset(half_offset),
        }
        has_moved = any(progress.value != lowest[name] for name, progress in self._progress.items())
        for topic, progress in self._progress.items():
            if has_moved:
                progress.advance(lowest[topic], self._store.written_offset)
            durable = progress.durable_value(self._store.synced_offset)
            if durable > max(self._offsets.committed(TRANSACTION_GROUP, topic, 0), 0):
                self._offsets.commit(TRANSACTION_GROUP, topic, 0, durable)

    # --------------------------------------------------------------------------- timed work

    def run_slice(self) -> None:
        """Check the transactions that are due, and copy old messages, for one slice.

        First come checks that have waited for a client of their group, if one has connected. Ops
        that an earlier call could not append are appended before. At the end, the offsets of the
        two queues are committed. If the store accepts no messages, that is logged once, and a later
        call tries again. Do nothing before `load`, after `stop`, and on a read-only broker.
        """
        if not self.is_running:
            return
        try:
            self.append_ops_of_superseded()
            work = TimeSlice(self._steady, SLICE_S, SLICE_TRANSACTIONS)
            while not work.is_over:
                due = self._waiting_checks.pop() or self.table.pop_due(work.now_ms)
                if due is None:
                    break
                # Scheduled first, so that the next attempt is an interval away in any case.
                self.table.schedule(due, work.now_ms + self.interval_ms)
                has_invisible_copy = due.copy_offset is not None
                if not has_invisible_copy:
                    self._check_or_abandon(due)
                work.count_done()
            self._carry_forward()
            self._logged_error = ""
        except StoreError as error:
            if str(error) != self._logged_error:
                self._logged_error = str(error)
                log.error("cannot check transactions, retrying: %s", error)
        self.commit_progress()

    def stop(self) -> None:
        """Stop checking transactions, and commit the offsets from which the next start reads."""
        self.commit_progress()
        self.is_running = False
        for topic in (HALF_TOPIC, OP_TOPIC):
            self._group_commit.topic_listeners.pop(topic, None)

    def note_join(self, group: str) -> None:
        """Let `run_slice` check the transactions that have waited for a client of this group."""
        self._waiting_checks.note_join(group)

    def _check_or_abandon(self, transaction: OpenTransaction) -> None:
        """Check a transaction that is due, or abandon it.

        - If its message is deleted, it is logged and counted as lost, and ended.
        - If it was checked often enough, or is older than the log is kept, it is abandoned: its
          message is copied to TRANS_CHECK_MAX_TIME_TOPIC, and it is ended.
        - If no member of the producer group is connected, the check waits until one connects.
        - Otherwise a copy of its message that counts one more check is appended. The check is sent
          when the copy is visible.

        If the last check was not answered, that is counted first. Raises StoreError.
        """
        self._waiting_checks.discard(transaction)
        record = self.reader.read_record(transaction.physical_offset)
        if record is None:
            self.lost_count += 1
            log.error(
                "the half message of transaction %s was deleted before the transaction was "
                "decided. Increase fileReservedTime",
                transaction.unique_id,
            )
            self.append_end(transaction, ABANDONED)
            return

        self.checker.note_unanswered(transaction, record)
        age_ms = self._clock.now_ms() - transaction.started_ms
        retention_ms = self._settings.store.file_reserved_hours * _HOUR_MS
        is_checked_enough = transaction.check_count >= self._settings.broker.transaction_check_max
        if is_checked_enough or age_ms > retention_ms:
            # The message before its op, which `append_end` appends right after it.
            self._topics.ensure(CHECK_MAX_TOPIC, 1)
            properties = original_properties(record)
            self._intake.append(copy_prepared_to(record, CHECK_MAX_TOPIC, 0, properties))
            self._abandoned[transaction.offset] = AbandonedTransaction(
                unique_id=record.get_text(UNIQ_KEY),
                group=record.get_text(PRODUCER_GROUP),
                topic=record.get_text(REAL_TOPIC),
                check_count=transaction.check_count,
                age_ms=age_ms,
            )
            self.append_end(transaction, ABANDONED)
            return
        group = record.get_text(PRODUCER_GROUP)
        if self.checker.choose_member(group) is None:
            self._waiting_checks.add(group, transaction)
        else:
            self.append_copy(transaction, record, transaction.check_count + 1)

    def _report_abandoned(self, transaction: AbandonedTransaction) -> None:
        """Log and count an abandoned transaction, and call the hooks in `on_given_up` with it.

        A hook that raises an exception is logged. The other hooks are still called.
        """
        self.abandoned_count += 1
        log.error(
            "transaction %s of producer group %s for topic %s is abandoned after %d checks in "
            "%.0f s: its message was moved to %s",
            transaction.unique_id,
            transaction.group,
            transaction.topic,
            transaction.check_count,
            transaction.age_ms / 1000,
            CHECK_MAX_TOPIC,
        )
        for hook in self.on_given_up:
            try:
                hook(transaction)
            except Exception:  # the hook is the application's code
                log.exception("a hook for abandoned transactions failed")

    def _carry_forward(self) -> None:
        """Append copies of old messages of open transactions to the end of the half queue.

        So a start need not read the whole queue. A message is old if too many messages follow it:
        WINDOW_MESSAGES, or four times the number of open transactions if that is more. Transactions
        that are ending, that have a copy already, or whose message is deleted are left out. At most
        SLICE_TRANSACTIONS copies are appended. Raises StoreError.
        """
        table = self.table
        window_size = max(WINDOW_MESSAGES, 4 * len(table))
        window_start = table.next_half_offset - window_size
        # The table is in the order of offsets.
        old_transactions = takewhile(lambda transaction: transaction.offset < window_start, table)
        for transaction in list(islice(old_transactions, SLICE_TRANSACTIONS)):
            record = self.reader.read_record(transaction.physical_offset)
            if record is not None and transaction.copy_offset is None and not transaction.is_ending:
                self.append_copy(transaction, record, transaction.check_count)
