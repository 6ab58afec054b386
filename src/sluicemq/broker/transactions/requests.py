"""How transactions end by request: 37 of a producer, and by hand (900111, 900112, ours).

What 37 has to prove is RocketMQ's (spec/delivery.md §3): the prepared message it names exists,
belongs to its group and lies where it says; an end that comes unasked after the time that the
producer itself has asked for (CHECK_IMMUNITY_TIME_IN_SECONDS) is too late. Commit and rollback are
answered when the end is safe; clients of RocketMQ do not wait for it.
"""

import logging
from dataclasses import dataclass
from typing import Final

from sluicemq.acl.guard import Access
from sluicemq.acl.verdict import PUB
from sluicemq.broker.group_commit import Durable
from sluicemq.broker.produce.intake import Record
from sluicemq.broker.settings import Settings
from sluicemq.broker.transactions.prepared import Prepared, prepared_of
from sluicemq.broker.transactions.transactions import OUTCOMES, Transactions
from sluicemq.clock import Clock
from sluicemq.errors import RequestError
from sluicemq.model.message import (
    COMMITTED,
    KEYS,
    PRODUCER_GROUP,
    REAL_QUEUE,
    REAL_TOPIC,
    ROLLED_BACK,
    TAGS,
)
from sluicemq.net.dispatch import Peer
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command, encode_response
from sluicemq.wire.headers import (
    EndTransactionRequest,
    ListTransactionsRequest,
    ListTransactionsResponse,
    ResolveTransactionRequest,
)

log = logging.getLogger(__name__)

PAGE_MAX: Final = 1000
# What the real broker says, or forgets to say (spec/traffic item 10).
_REMARKS: Final = {COMMITTED: None, ROLLED_BACK: "not set any response code"}


@dataclass(slots=True, eq=False)
class TransactionRequests:
    """The request family of transactions."""

    settings: Settings
    transactions: Transactions
    clock: Clock
    access: Access

    # --- by a producer

    def end(self, header: EndTransactionRequest, command: Command, peer: Peer) -> Durable | None:
        """37. What is undecided is not answered, as clients know it."""
        transactions, outcome = self.transactions, header.outcome
        if header.is_from_check:
            asked = transactions.table.at(header.half_queue_offset)
            about = None if asked is None else transactions.reader.record(asked.physical_offset)
            if about is not None:
                self.access.require(about.get_text(REAL_TOPIC), PUB)
            transactions.check_back.answered(asked, peer)
        if outcome == 0:
            return None
        if outcome not in _REMARKS:
            raise _wrong(
                f"commitOrRollback is {outcome}: 8 commits, 12 rolls back, 0 leaves it undecided."
            )
        record = transactions.reader.named(header.physical_offset)
        if record is None:
            raise _wrong(
                f"there is no half message at commitLogOffset {header.physical_offset}: it is "
                "deleted, or was never there."
            )
        self.access.require(record.get_text(REAL_TOPIC), PUB)
        message = prepared_of(record, record.queue_offset)
        try:
            self._check(header, record, message)
        except RequestError as error:
            log.warning("the end of a transaction by %s is refused: %s", peer.remote, error.remark)
            raise
        transaction = transactions.table.of(message)
        if transaction is None or transaction.is_ending:
            known = transactions.outcome_of(message)
            if known is None or known == outcome:
                return _success(command, "the transaction was ended before: nothing has changed")
            log.warning(
                "transaction %s was %s before and its producer says %s now: it stays so",
                message.unique_id, OUTCOMES[known], OUTCOMES[outcome],
            )  # fmt: skip
            raise _wrong(f"the transaction was {OUTCOMES[known]} before: it stays so.")
        try:
            transactions.decide(transaction, outcome)
        except RequestError as error:
            log.warning("transaction %s: %s", message.unique_id, error.remark)
            raise
        return _success(command, _REMARKS[outcome])

    def _check(self, header: EndTransactionRequest, record: Record, message: Prepared) -> None:
        """Raises RequestError for an end that does not fit its prepared message."""
        if record.get_text(PRODUCER_GROUP) != header.group:
            raise _wrong("The producer group wrong")
        if message.offset != header.half_queue_offset:
            raise _wrong("The transaction state table offset wrong")
        if message.immunity_ms is None or header.is_from_check:
            return
        allowed_ms = max(message.immunity_ms, self.settings.broker.transaction_timeout_ms)
        age_ms = self.clock.now_ms() - message.began_ms
        if age_ms > allowed_ms:
            raise RequestError(
                ResponseCode.ILLEGAL_OPERATION,
                f"the transaction is {age_ms:,} ms old, its producer had "
                f"{allowed_ms:,} ms (CHECK_IMMUNITY_TIME_IN_SECONDS): a check decides "
                "now.",
            )

    # --- by hand

    def listed(self, header: ListTransactionsRequest, command: Command, peer: Peer) -> Command:
        """900111: open transactions, by the offsets of their messages."""
        count_max = min(max(header.count_max or PAGE_MAX, 1), PAGE_MAX)
        after = -1 if header.after is None else header.after
        table = self.transactions.table
        found: list[bodies.OpenTransaction] = []
        looked_at, last = 0, None
        for transaction in table:
            if transaction.offset <= after:
                continue
            if looked_at == PAGE_MAX or len(found) == count_max:
                break
            looked_at, last = looked_at + 1, transaction.offset
            record = self.transactions.reader.record(transaction.physical_offset)
            if record is None:
                continue
            group, topic = record.get_text(PRODUCER_GROUP), record.get_text(REAL_TOPIC)
            if header.group in (None, "", group) and header.topic in (None, "", topic):
                found.append(bodies.OpenTransaction(
                    transaction.key, group, topic, record.get_number(REAL_QUEUE) or 0,
                    record.get_text(KEYS), record.get_text(TAGS), transaction.began_ms,
                    transaction.checks, transaction.due_ms,
                    "" if transaction.asked is None else str(transaction.asked.remote),
                    transaction.offset, transaction.physical_offset, len(record.body),
                ))  # fmt: skip
        else:
            last = None
        fields = encode_header(ListTransactionsResponse(count=len(table), after=last))
        body = bodies.encode_open_transactions(found)
        return Command(ResponseCode.SUCCESS, fields, body)

    def resolve(self, header: ResolveTransactionRequest, command: Command, peer: Peer) -> Durable:
        """900112: an operator decides."""
        if header.outcome not in _REMARKS:
            raise RequestError(ResponseCode.INVALID_PARAMETER, "commitOrRollback is 8 or 12.")
        transaction = self.transactions.table.find(header.transaction_id)
        if transaction is None or transaction.is_ending:
            raise RequestError(
                ResponseCode.QUERY_NOT_FOUND,
                f"no transaction {header.transaction_id} is undecided here.",
            )
        self.transactions.decide(transaction, header.outcome)
        log.warning(
            "transaction %s is %s by hand, from %s",
            header.transaction_id, OUTCOMES[header.outcome], peer.remote,
        )  # fmt: skip
        return _success(command, None)


def _wrong(remark: str) -> RequestError:
    return RequestError(ResponseCode.SYSTEM_ERROR, remark)


def _success(command: Command, remark: str | None) -> Durable:
    """An answer that leaves when what it says is safe."""
    if command.is_oneway:
        return Durable(b"")
    return Durable(encode_response(command, ResponseCode.SUCCESS, remark=remark))
