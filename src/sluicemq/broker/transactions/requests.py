"""Requests that end or list transactions.

Producers end transactions by END_TRANSACTION (37), operators by SLUICE_RESOLVE_TRANSACTION
(900112). SLUICE_LIST_TRANSACTIONS (900111) lists the open ones.

The checks of END_TRANSACTION are RocketMQ's (spec/delivery.md §3): the prepared message that the
request names must exist, belong to the request's group and be at the named position. An end that
does not answer a check is too late after the time that the producer itself has demanded
(CHECK_IMMUNITY_TIME_IN_SECONDS). A commit or rollback is answered when its records are durable;
RocketMQ's clients do not wait for the answer.
"""

import logging
from dataclasses import dataclass
from typing import Final

from sluicemq.acl.guard import Access
from sluicemq.acl.verdict import PUB
from sluicemq.broker.group_commit import Durable
from sluicemq.broker.produce.intake import Record
from sluicemq.broker.settings import Settings
from sluicemq.broker.transactions.prepared import (
    OpenTransaction,
    PreparedMessage,
    parse_prepared,
)
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

LIST_MAX: Final = 1000
"""The number of transactions that a list contains, and that its handler examines, at most."""

_REMARKS: Final = {COMMITTED: None, ROLLED_BACK: "not set any response code"}
"""The remarks of RocketMQ's answers, which clients may compare (spec/traffic item 10)."""


@dataclass(slots=True, eq=False)
class TransactionRequests:
    """The handlers of requests about transactions."""

    settings: Settings
    transactions: Transactions
    clock: Clock
    access: Access

    # --- requests of producers

    def end_transaction(
        self, header: EndTransactionRequest, command: Command, peer: Peer
    ) -> Durable | None:
        """Handle END_TRANSACTION (37): commit or roll back a transaction.

        `header.outcome` is COMMITTED, ROLLED_BACK, or 0 for undecided. An undecided outcome changes
        nothing, and None is returned: no answer is sent, as in RocketMQ. If `header.is_from_check`
        is true, the request answers a check of the broker, which is recorded.

        If the transaction has already ended with the same outcome, or its outcome is not remembered
        any more, nothing is changed, and the answer is a success.

        Raises RequestError if the outcome or the prepared message is not valid, if the request is
        too late, if the account may not send to the topic, or if the transaction has ended with the
        other outcome. Refusals are logged, except for a wrong outcome or position.
        """
        transactions = self.transactions
        outcome = header.outcome
        if header.is_from_check:
            self._note_answer(header, peer)
        if outcome == 0:
            return None
        if outcome not in _REMARKS:
            raise _make_end_error(
                f"commitOrRollback must be 8 (commit), 12 (rollback) or 0 (undecided), got "
                f"{outcome}."
            )

        # Find the prepared message, and check that the request is about it.
        record = transactions.reader.find_prepared(header.physical_offset)
        if record is None:
            raise _make_end_error(
                f"there is no half message at commitLogOffset {header.physical_offset}. It was "
                "deleted, or never existed."
            )
        self.access.require(record.get_text(REAL_TOPIC), PUB)
        message = parse_prepared(record, record.queue_offset)
        try:
            self._check_end(header, record, message)
        except RequestError as error:
            log.warning("refused the end of a transaction by %s: %s", peer.remote, error.remark)
            raise

        # End the transaction, unless it has ended.
        transaction = transactions.table.find_for_message(message)
        if transaction is None or transaction.is_ending:
            self._check_same_outcome(message, outcome)
            return _encode_success(
                command, "the transaction has already ended, nothing was changed"
            )
        try:
            transactions.decide(transaction, outcome)
        except RequestError as error:
            log.warning("transaction %s: %s", message.unique_id, error.remark)
            raise
        return _encode_success(command, _REMARKS[outcome])

    def _check_same_outcome(self, message: PreparedMessage, outcome: int) -> None:
        """Raise RequestError if the transaction of `message` has ended with another outcome.

        A warning is logged then. Do nothing if the outcome is not remembered any more.
        """
        earlier_outcome = self.transactions.recent_outcome(message)
        if earlier_outcome is None or earlier_outcome == outcome:
            return
        log.warning(
            "transaction %s was %s before; ignoring that its producer now reports it as %s",
            message.unique_id,
            OUTCOMES[earlier_outcome],
            OUTCOMES[outcome],
        )
        raise _make_end_error(
            f"the transaction was {OUTCOMES[earlier_outcome]} before and cannot change."
        )

    def _note_answer(self, header: EndTransactionRequest, peer: Peer) -> None:
        """Record that the client at `peer` has answered the check that `header` names.

        Raises RequestError if the client's account may not send to the topic of the transaction. A
        transaction that has ended meanwhile is not checked for that.
        """
        transactions = self.transactions
        checked = transactions.table.get(header.half_queue_offset)
        if checked is not None:
            record = transactions.reader.read_record(checked.physical_offset)
            if record is not None:
                self.access.require(record.get_text(REAL_TOPIC), PUB)
        transactions.checker.note_answer(checked, peer)

    def _check_end(
        self, header: EndTransactionRequest, record: Record, message: PreparedMessage
    ) -> None:
        """Raise RequestError if a request does not match its prepared message, or is too late.

        `record` and `message` are the prepared message that the request names. The producer group
        and the queue offset in `header` must be those of the message. A message may set a time
        before its first check. After that time, only a request that answers a check is accepted.
        """
        if record.get_text(PRODUCER_GROUP) != header.group:
            raise _make_end_error("The producer group wrong")
        if message.offset != header.half_queue_offset:
            raise _make_end_error("The transaction state table offset wrong")
        if message.immunity_ms is None or header.is_from_check:
            return
        allowed_ms = max(message.immunity_ms, self.settings.broker.transaction_timeout_ms)
        age_ms = self.clock.now_ms() - message.started_ms
        if age_ms > allowed_ms:
            raise RequestError(
                ResponseCode.ILLEGAL_OPERATION,
                f"the transaction is {age_ms:,} ms old, but its producer had only "
                f"{allowed_ms:,} ms (CHECK_IMMUNITY_TIME_IN_SECONDS). A check decides it now.",
            )

    # --- requests of operators

    def list_open(self, header: ListTransactionsRequest, command: Command, peer: Peer) -> Command:
        """Handle SLUICE_LIST_TRANSACTIONS (900111): list open transactions in order of offsets.

        The list begins after the offset `header.after` of the half queue; None means its start. It
        has at most `header.count_max` transactions. If `header.group` or `header.topic` is set,
        only transactions of that producer group or topic are listed. At most LIST_MAX transactions
        are examined, so the list may be shorter, even empty, although more follow.

        In the answer, "after" is the value with which the next request continues. It is missing at
        the end. "count" is the number of all open transactions.
        """
        count_max = min(max(header.count_max or LIST_MAX, 1), LIST_MAX)
        after = -1 if header.after is None else header.after
        table = self.transactions.table
        listed: list[bodies.OpenTransaction] = []
        examined_count = 0
        last_offset = None
        for transaction in table:
            if transaction.offset <= after:
                continue
            if examined_count == LIST_MAX or len(listed) == count_max:
                break
            examined_count += 1
            last_offset = transaction.offset
            record = self.transactions.reader.read_record(transaction.physical_offset)
            if record is not None and _is_requested(header, record):
                listed.append(_describe_transaction(transaction, record))
        else:
            last_offset = None  # The whole table was examined: there is no next page.
        fields = encode_header(ListTransactionsResponse(count=len(table), after=last_offset))
        body = bodies.encode_open_transactions(listed)
        return Command(ResponseCode.SUCCESS, fields, body)

    def resolve(self, header: ResolveTransactionRequest, command: Command, peer: Peer) -> Durable:
        """Handle SLUICE_RESOLVE_TRANSACTION (900112): an operator ends a transaction.

        `header.transaction_id` is the key of an open transaction, as `list_open` returns it. The
        outcome and the operator's address are logged. The answer is sent when the records of the
        end are durable.

        Raises RequestError if the outcome is not valid, if no such transaction is open, or if its
        message cannot be committed.
        """
        if header.outcome not in _REMARKS:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"commitOrRollback must be 8 (commit) or 12 (rollback), got {header.outcome}.",
            )
        transaction = self.transactions.table.find(header.transaction_id)
        if transaction is None or transaction.is_ending:
            raise RequestError(
                ResponseCode.QUERY_NOT_FOUND,
                f"this broker has no undecided transaction {header.transaction_id}.",
            )
        self.transactions.decide(transaction, header.outcome)
        log.warning(
            "transaction %s was %s by an operator at %s",
            header.transaction_id,
            OUTCOMES[header.outcome],
            peer.remote,
        )
        return _encode_success(command, None)


def _is_requested(header: ListTransactionsRequest, record: Record) -> bool:
    """Return whether `header` asks for the transaction of a prepared message.

    None or "" in a field of the header means all groups, or all topics.
    """
    is_of_group = header.group in (None, "", record.get_text(PRODUCER_GROUP))
    is_of_topic = header.topic in (None, "", record.get_text(REAL_TOPIC))
    return is_of_group and is_of_topic


def _describe_transaction(transaction: OpenTransaction, record: Record) -> bodies.OpenTransaction:
    """Return the description of a transaction, an element of the list for tools.

    `record` is the newest prepared message of the transaction.
    """
    asked_peer = transaction.asked_peer
    asked_address = str(asked_peer.remote) if asked_peer is not None else ""
    return bodies.OpenTransaction(
        transaction.key,
        record.get_text(PRODUCER_GROUP),
        record.get_text(REAL_TOPIC),
        record.get_number(REAL_QUEUE) or 0,
        record.get_text(KEYS),
        record.get_text(TAGS),
        transaction.started_ms,
        transaction.check_count,
        transaction.due_ms,
        asked_address,
        transaction.offset,
        transaction.physical_offset,
        len(record.body),
    )


def _make_end_error(remark: str) -> RequestError:
    """Return the error with code SYSTEM_ERROR, as RocketMQ's broker uses it here."""
    return RequestError(ResponseCode.SYSTEM_ERROR, remark)


def _encode_success(command: Command, remark: str | None) -> Durable:
    """Return a successful answer that is sent when the records of the end are durable.

    A one-way request, as RocketMQ's clients send it, gets no answer (b"").
    """
    if command.is_oneway:
        return Durable(b"")
    return Durable(encode_response(command, ResponseCode.SUCCESS, remark=remark))
