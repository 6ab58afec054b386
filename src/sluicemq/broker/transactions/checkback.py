"""Who is asked how a transaction ended, and how the question looks (39).

Any live connection whose heartbeat names the producer group may be asked: the sender may be dead.
They take turns. One that was asked and has not answered by the next check (a producer of the group
without a TransactionListener, or a check that hangs) is named in the log once, and the others come
before it until it answers.
"""

import logging
from itertools import count
from typing import Final

from sluicemq.broker.consume.clients import Member, Producers
from sluicemq.broker.produce.redelivery import Record
from sluicemq.broker.topics import HALF_TOPIC
from sluicemq.broker.transactions.open import OpenTransaction
from sluicemq.broker.transactions.prepared import REAL_QUEUE
from sluicemq.model.ids import offset_message_id
from sluicemq.model.message import PRODUCER_GROUP, REAL_TOPIC, TRANSACTION_MASK, UNIQ_KEY
from sluicemq.net.dispatch import Peer
from sluicemq.record.codec import encode_record
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import CheckTransactionStateRequest

log = logging.getLogger(__name__)

_UNANSWERED: Final = "transaction checks without an answer"
_NAMES_MAX: Final = 1024


class CheckBack:
    """Chooses and asks the members of producer groups."""

    def __init__(self, producers: Producers, broker_name: str) -> None:
        self._producers = producers
        self._broker_name = broker_name
        self._turn = count()
        self._named: set[tuple[str, str]] = set()
        self._alone: set[str] = set()
        self.sent = 0
        self.unanswered = 0

    def choose(self, group: str) -> Member | None:
        """Whom to ask next; None when nobody of the group is connected."""
        members = self._producers.groups.get(group, {}).values()
        live = [member for member in members if not member.peer.closed]
        if not live:
            if group not in self._alone and len(self._alone) < _NAMES_MAX:
                self._alone.add(group)
                log.warning(
                    "a transaction of producer group %s is undecided and no client of the group is "
                    "connected: it is checked when one comes", group,
                )  # fmt: skip
            return None
        self._alone.discard(group)
        least = min(_unanswered(member.peer) for member in live)
        willing = [member for member in live if _unanswered(member.peer) == least]
        return willing[next(self._turn) % len(willing)]

    def ask(self, transaction: OpenTransaction, record: Record) -> None:
        """Send the question about a prepared message that can be seen."""
        member = self.choose(record.text(PRODUCER_GROUP))
        if member is None:
            return
        transaction.asked = member.peer
        self.sent += 1
        member.peer.notify(question(transaction, record, self._broker_name))

    def overdue(self, transaction: OpenTransaction, record: Record) -> None:
        """The next check is due: has the last one been answered?"""
        peer, transaction.asked = transaction.asked, None
        if peer is None or peer.closed:
            return
        self.unanswered += 1
        peer.labels[_UNANSWERED] = _unanswered(peer) + 1
        group = record.text(PRODUCER_GROUP)
        member = self._producers.groups.get(group, {}).get(peer)
        client_id = member.client_id if member is not None else str(peer.remote)
        if (group, client_id) not in self._named and len(self._named) < _NAMES_MAX:
            self._named.add((group, client_id))
            log.warning(
                "client %s of producer group %s was asked about transaction %s and has not "
                "answered: it has no TransactionListener, or its check hangs. Give every producer "
                "of the group a listener, or the ones without a group of their own. The next check "
                "goes to another client.", client_id, group, transaction.key,
            )  # fmt: skip

    def answered(self, transaction: OpenTransaction | None, peer: Peer) -> None:
        """A client has answered a check."""
        peer.labels.pop(_UNANSWERED, None)
        if transaction is not None:
            transaction.asked = None


def _unanswered(peer: Peer) -> int:
    return int(peer.labels.get(_UNANSWERED, 0))


def question(transaction: OpenTransaction, record: Record, broker_name: str) -> Command:
    """39: the prepared message as it was sent, in stored form (spec/remoting.md §7.6)."""
    unique_id = record.text(UNIQ_KEY) or None
    fields = encode_header(
        CheckTransactionStateRequest(
            topic=HALF_TOPIC,
            half_queue_offset=transaction.offset,
            physical_offset=transaction.physical_offset,
            unique_id=unique_id,
            transaction_id=unique_id,
            offset_message_id=offset_message_id(record.store_host, transaction.physical_offset),
            broker=broker_name,
        )
    )
    body = encode_record(
        topic=record.text(REAL_TOPIC),
        queue_id=record.number(REAL_QUEUE) or 0,
        queue_offset=transaction.offset,
        physical_offset=transaction.physical_offset,
        body=record.body,
        properties=record.properties,
        flag=record.flag,
        sys_flag=record.sys_flag & ~TRANSACTION_MASK,
        born_time_ms=record.born_time_ms,
        born_host=record.born_host,
        store_time_ms=record.store_time_ms,
        store_host=record.store_host,
        reconsume_times=record.reconsume_times,
    )
    return Command(RequestCode.CHECK_TRANSACTION_STATE, fields, body)
