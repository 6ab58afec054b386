"""What time demands of open transactions, in slices that the sweep calls.

A transaction that is old enough is due. It is asked about: its message is written once more with
one check more, and when that one can be seen, a client of its group is asked (`checkback.py`). A
check counts when somebody is there to be asked; RocketMQ counts on, and drops after some minutes
what no producer could answer. What was asked about transactionCheckMax times, or is older than the
log is kept, is given up: its message goes to TRANS_CHECK_MAX_TIME_TOPIC, one line in the log, a
counter, a hook.

Stragglers are carried forward: a prepared message that is left far behind is written once more at
the end of its queue. Otherwise one old transaction would make every start read all that came after
it, and its file would be deleted under it.
"""

import logging
from collections.abc import Callable
from itertools import islice, takewhile
from typing import Final, NamedTuple

from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import LIMIT_TOPIC
from sluicemq.broker.transactions.open import OpenTransaction
from sluicemq.broker.transactions.prepared import properties_of
from sluicemq.broker.transactions.transactions import GIVEN_UP, Transactions
from sluicemq.broker.work import Slice
from sluicemq.clock import Clock
from sluicemq.errors import StoreError
from sluicemq.model.message import PRODUCER_GROUP, REAL_TOPIC, UNIQ_KEY

log = logging.getLogger(__name__)

SLICE_S: Final = 0.004
SLICE_TRANSACTIONS: Final = 1024
WINDOW_MESSAGES: Final = 20_000
"""Of the half queue are read at a start; more when a quarter of them is open."""
_HOUR_MS: Final = 3_600_000


class GivenUp(NamedTuple):
    """A transaction that nobody would decide; its message lies in TRANS_CHECK_MAX_TIME_TOPIC."""

    unique_id: str
    group: str
    topic: str
    checks: int
    age_ms: int


class TransactionChecks:
    """Checks what is due. `on_given_up` are told of each transaction that is given up."""

    def __init__(self, settings: Settings, transactions: Transactions, clock: Clock) -> None:
        self._settings = settings
        self._transactions = transactions
        self._clock = clock
        self._giving_up: dict[int, GivenUp] = {}
        self._complaint = ""
        self.on_given_up: list[Callable[[GivenUp], None]] = []
        self.given_up = 0
        self.lost = 0
        """Messages that were deleted before their transactions were decided."""
        transactions.on_done = self._done

    def run(self) -> None:
        """One slice."""
        if not self._transactions.is_on:
            return
        try:
            self._transactions.mark_superseded()
            self._check_due(Slice(self._clock, SLICE_S, SLICE_TRANSACTIONS))
            self._carry()
            self._complaint = ""
        except StoreError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("transactions wait to be checked: %s", error)
        self._transactions.note_progress()

    def stop(self) -> None:
        """Ask nobody any more."""
        self._transactions.note_progress()
        self._transactions.is_on = False

    # --- checks

    def _check_due(self, work: Slice) -> None:
        table, interval_ms = self._transactions.table, self._transactions.interval_ms
        while not work.is_over and (transaction := table.pop_due(work.now_ms)) is not None:
            # Whatever comes of it now: not again before the next time.
            table.plan(transaction, work.now_ms + interval_ms)
            if transaction.copy_offset is None:
                self._check(transaction, work.now_ms)
            work.done()

    def _check(self, transaction: OpenTransaction, now_ms: int) -> None:
        transactions = self._transactions
        record = transactions.reader.record(transaction.physical_offset)
        if record is None:
            self.lost += 1
            log.error(
                "the half message of transaction %s is deleted, undecided: raise fileReservedTime",
                transaction.unique_id,
            )  # fmt: skip
            transactions.end(transaction, GIVEN_UP)
            return
        transactions.check_back.overdue(transaction, record)
        age_ms = now_ms - transaction.began_ms
        kept_ms = self._settings.store.file_reserved_hours * _HOUR_MS
        if transaction.checks >= self._settings.broker.transaction_check_max or age_ms > kept_ms:
            transactions.put_aside(record, properties_of(record))
            self._giving_up[transaction.offset] = GivenUp(
                record.text(UNIQ_KEY), record.text(PRODUCER_GROUP), record.text(REAL_TOPIC),
                transaction.checks, age_ms,
            )  # fmt: skip
            transactions.end(transaction, GIVEN_UP)
        elif transactions.check_back.choose(record.text(PRODUCER_GROUP)) is not None:
            transactions.copy(transaction, record, transaction.checks + 1)

    def _done(self, offset: int) -> None:
        known = self._giving_up.pop(offset, None)
        if known is None:
            return
        self.given_up += 1
        log.error(
            "transaction %s of producer group %s for topic %s is given up after %d checks in "
            "%.0f s: its message is kept in %s",
            known.unique_id, known.group, known.topic, known.checks, known.age_ms / 1000,
            LIMIT_TOPIC,
        )  # fmt: skip
        for listener in self.on_given_up:
            try:
                listener(known)
            except Exception:  # somebody else's code: the broker goes on
                log.exception("a hook for transactions that are given up failed")

    # --- stragglers

    def _carry(self) -> None:
        transactions = self._transactions
        table = transactions.table
        limit = table.half_next - max(WINDOW_MESSAGES, 4 * len(table))
        stragglers = takewhile(lambda transaction: transaction.offset < limit, table)
        for transaction in list(islice(stragglers, SLICE_TRANSACTIONS)):
            record = transactions.reader.record(transaction.physical_offset)
            if record is not None and transaction.copy_offset is None and not transaction.is_ending:
                transactions.copy(transaction, record, transaction.checks)
