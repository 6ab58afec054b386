"""How transactions end by request: 37 of a producer, and by hand (900111, 900112, ours).

What 37 has to prove is RocketMQ's (spec/delivery.md §3): the half message it names exists, belongs
to its group and lies where it says; an end that comes unasked after the time that the producer
itself has asked for (CHECK_IMMUNITY_TIME_IN_SECONDS) is too late. Commit and rollback answer when
the end is safe; clients of RocketMQ do not wait for it.
"""

import logging
from typing import Final

from sluicemq.broker.access import PUB, Access
from sluicemq.broker.produce.intake import RefusalError
from sluicemq.broker.produce.redelivery import Record
from sluicemq.broker.settings import Settings
from sluicemq.broker.transactions.open import Undecided
from sluicemq.broker.transactions.prepared import REAL_QUEUE, Half, properties_of
from sluicemq.broker.transactions.transactions import OUTCOMES, Transactions
from sluicemq.broker.turns import Durable
from sluicemq.clock import Clock
from sluicemq.errors import RequestError
from sluicemq.model.message import (
    COMMITTED,
    KEYS,
    PRODUCER_GROUP,
    REAL_TOPIC,
    ROLLED_BACK,
    TAGS,
)
from sluicemq.net.dispatch import Handler
from sluicemq.net.peer import Peer
from sluicemq.record import property_text as text
from sluicemq.wire import bodies
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import Command, encode_answer
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


class Ending:
    """The request family of transactions."""

    def __init__(
        self,
        settings: Settings,
        transactions: Transactions,
        clock: Clock,
        access: Access | None = None,
    ) -> None:
        self._settings = settings
        self._transactions = transactions
        self._clock = clock
        self._access = access or Access()

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.END_TRANSACTION: self.end,
            RequestCode.SLUICE_LIST_TRANSACTIONS: self.listed,
            RequestCode.SLUICE_RESOLVE_TRANSACTION: self.resolve,
        }

    # --- by a producer

    def end(self, command: Command, peer: Peer) -> Command | Durable | None:
        """37. What is undecided is not answered, as clients know it."""
        header = decode_header(EndTransactionRequest, command.fields)
        transactions = self._transactions
        if header.is_check_answer:
            asked = transactions.table.at(header.half_queue_offset)
            transactions.check_back.answered(asked, peer)
        if header.outcome == 0:
            return None
        if header.outcome not in (COMMITTED, ROLLED_BACK):
            return _wrong(
                f"commitOrRollback is {header.outcome}: 8 commits, 12 rolls back, 0 leaves it "
                "undecided."
            )
        found = transactions.reader.named(header.physical_offset)
        if found is None:
            return _wrong(
                f"there is no half message at commitLogOffset {header.physical_offset}: it is "
                "deleted, or was never there."
            )
        topic = text.value_of(found[0].properties, REAL_TOPIC.encode()) or b""
        self._access.require(topic.decode("utf-8", "replace"), PUB)
        refusal = self._refusal(header, *found)
        if refusal is None:
            return self._end(command, found[1], header.outcome)
        log.warning("the end of a transaction by %s is refused: %s", peer.remote, refusal.remark)
        return refusal

    def _refusal(self, header: EndTransactionRequest, record: Record, half: Half) -> Command | None:
        group = text.value_of(record.properties, PRODUCER_GROUP.encode()) or b""
        if group != header.group.encode():
            return _wrong("The producer group wrong")
        if half.offset != header.half_queue_offset:
            return _wrong("The transaction state table offset wrong")
        if half.immunity_ms is None or header.is_check_answer:
            return None
        allowed_ms = max(half.immunity_ms, self._settings.broker.transaction_timeout_ms)
        age_ms = self._clock.now_ms() - half.began_ms
        if age_ms <= allowed_ms:
            return None
        return Command(
            ResponseCode.ILLEGAL_OPERATION,
            remark=f"the transaction is {age_ms / 1000:,.0f} s old, its producer had "
            f"{allowed_ms / 1000:,.0f} s (CHECK_IMMUNITY_TIME_IN_SECONDS): a check decides now.",
        )

    def _end(self, command: Command, half: Half, outcome: int) -> Command | Durable:
        transaction = self._transactions.table.of(half)
        if transaction is None or transaction.is_ending:
            return self._again(command, half, outcome)
        try:
            self._transactions.decide(transaction, outcome)
        except RefusalError as refusal:
            log.warning("transaction %s: %s", half.unique_id, refusal.remark)
            return Command(refusal.code, remark=refusal.remark)
        return _success(command, _REMARKS[outcome])

    def _again(self, command: Command, half: Half, outcome: int) -> Command | Durable:
        known = self._transactions.outcome_of(half)
        if known is None or known == outcome:
            return _success(command, "the transaction was ended before: nothing has changed")
        log.warning(
            "transaction %s was %s before and its producer says %s now: it stays so",
            half.unique_id, OUTCOMES[known], OUTCOMES[outcome],
        )  # fmt: skip
        return _wrong(f"the transaction was {OUTCOMES[known]} before: it stays so.")

    # --- by hand

    def listed(self, command: Command, peer: Peer) -> Command:
        """900111: undecided transactions, by their halves' offsets."""
        header = decode_header(ListTransactionsRequest, command.fields)
        count_max = min(max(header.count_max or PAGE_MAX, 1), PAGE_MAX)
        after = -1 if header.after is None else header.after
        table = self._transactions.table
        found: list[bodies.OpenTransaction] = []
        looked_at, last = 0, None
        for transaction in table:
            if transaction.offset <= after:
                continue
            if looked_at == PAGE_MAX or len(found) == count_max:
                break
            looked_at, last = looked_at + 1, transaction.offset
            item = self._shown(transaction)
            if item is not None and _is_meant(item, header):
                found.append(item)
        else:
            last = None
        fields = encode_header(ListTransactionsResponse(count=len(table), after=last))
        body = bodies.encode_open_transactions(found)
        return Command(ResponseCode.SUCCESS, fields, body)

    def _shown(self, transaction: Undecided) -> bodies.OpenTransaction | None:
        record = self._transactions.reader.record(transaction.physical_offset)
        if record is None:
            return None
        properties = properties_of(record)
        queue = properties.get(REAL_QUEUE, "")
        return bodies.OpenTransaction(
            transaction.key,
            properties.get(PRODUCER_GROUP, ""),
            properties.get(REAL_TOPIC, ""),
            int(queue) if queue.isdigit() else 0,
            properties.get(KEYS, ""),
            properties.get(TAGS, ""),
            transaction.began_ms,
            transaction.checks,
            transaction.due_ms,
            "" if transaction.asked is None else str(transaction.asked.remote),
            transaction.offset,
            transaction.physical_offset,
            len(record.body),
        )

    def resolve(self, command: Command, peer: Peer) -> Durable:
        """900112: an operator decides."""
        header = decode_header(ResolveTransactionRequest, command.fields)
        if header.outcome not in (COMMITTED, ROLLED_BACK):
            raise RequestError(ResponseCode.INVALID_PARAMETER, "commitOrRollback is 8 or 12.")
        transaction = self._transactions.table.find(header.transaction_id)
        if transaction is None or transaction.is_ending:
            raise RequestError(
                ResponseCode.QUERY_NOT_FOUND,
                f"no transaction {header.transaction_id} is undecided here.",
            )
        try:
            self._transactions.decide(transaction, header.outcome)
        except RefusalError as refusal:
            raise RequestError(refusal.code, refusal.remark) from refusal
        log.warning(
            "transaction %s is %s by hand, from %s",
            header.transaction_id, OUTCOMES[header.outcome], peer.remote,
        )  # fmt: skip
        return _success(command, None)


def _is_meant(item: bodies.OpenTransaction, header: ListTransactionsRequest) -> bool:
    return header.group in (None, "", item.group) and header.topic in (None, "", item.topic)


def _wrong(remark: str) -> Command:
    return Command(ResponseCode.SYSTEM_ERROR, remark=remark)


def _success(command: Command, remark: str | None) -> Durable:
    """An answer that leaves when what it says is safe."""
    if command.is_oneway:
        return Durable(b"")
    return Durable(encode_answer(command, ResponseCode.SUCCESS, remark=remark))
