"""Transaction checks: choose a client of a producer group, and ask how a transaction ended.

`Transactions` decides which transaction is checked. A check that was due while no client of its
group was connected waits in `WaitingChecks`.
"""

import logging
from itertools import count
from typing import Final

from sluicemq.broker.consume.clients import Member
from sluicemq.broker.produce.intake import Record
from sluicemq.broker.produce.producers import Producers
from sluicemq.broker.transactions.prepared import OpenTransaction
from sluicemq.model.ids import offset_message_id
from sluicemq.model.message import (
    PRODUCER_GROUP,
    REAL_QUEUE,
    REAL_TOPIC,
    TRANSACTION_MASK,
    UNIQ_KEY,
)
from sluicemq.model.system_names import HALF_TOPIC
from sluicemq.net.dispatch import Peer
from sluicemq.record.codec import encode_record
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import CheckTransactionStateRequest

log = logging.getLogger(__name__)

_UNANSWERED: Final = "transaction checks without an answer"
"""The attribute of a connection that counts the checks in a row that it has not answered."""

_NAMES_MAX: Final = 1024
"""The number of groups, and of clients, for which a warning that was logged is remembered."""


class TransactionChecker:
    """Sends transaction checks to producers, and notes which of them do not answer.

    Any open connection whose heartbeat names the producer group may be asked, because the sender
    may be gone. The connections are asked in turn. A client that has not answered by the next check
    (it has no TransactionListener, or its listener hangs) is logged once, and is asked only when
    all other clients have left as many checks unanswered.
    """

    def __init__(self, producers: Producers, broker_name: str) -> None:
        """Create a checker, which asks producers how their transactions ended.

        `producers` has the connected members of each producer group. `broker_name` is sent in each
        check, so that the client knows which broker to answer.
        """
        self._producers = producers
        self._broker_name = broker_name
        self._turn = count()
        self._logged_clients: set[tuple[str, str]] = set()
        """Groups and ids of clients for which an unanswered check was logged."""
        self._logged_groups: set[str] = set()
        """Groups without a connection, for which that was logged."""
        self.sent_count = 0
        """The number of checks that were sent."""
        self.unanswered_count = 0
        """The number of checks that were not answered before the next one."""

    def choose_member(self, group: str) -> Member | None:
        """Return the member of a producer group to ask next, or None if none is connected.

        It is one of the members with the fewest unanswered checks in a row. Successive calls return
        these members in turn. If no member is connected, a warning is logged once for the group.
        """
        members = self._producers.groups.get(group, {}).values()
        connected = [member for member in members if not member.peer.closed]
        if not connected:
            if group not in self._logged_groups and len(self._logged_groups) < _NAMES_MAX:
                self._logged_groups.add(group)
                log.warning(
                    "a transaction of producer group %s is undecided, but no client of the group "
                    "is connected. It is checked when a client connects",
                    group,
                )
            return None
        self._logged_groups.discard(group)
        unanswered_counts = [_unanswered_count(member.peer) for member in connected]
        lowest_count = min(unanswered_counts)
        candidates = [
            member
            for member, unanswered_count in zip(connected, unanswered_counts, strict=True)
            if unanswered_count == lowest_count
        ]
        return candidates[next(self._turn) % len(candidates)]

    def send_check(self, transaction: OpenTransaction, record: Record) -> None:
        """Ask a member of the producer group how a transaction ended, without waiting.

        `record` is the transaction's newest prepared message. The connection of the member is kept
        in `transaction.asked_peer`. The member answers with an END_TRANSACTION request. If no
        member is connected, nothing is sent.
        """
        member = self.choose_member(record.get_text(PRODUCER_GROUP))
        if member is None:
            return
        transaction.asked_peer = member.peer
        self.sent_count += 1
        member.peer.send_oneway(encode_check(transaction, record, self._broker_name))

    def note_unanswered(self, transaction: OpenTransaction, record: Record) -> None:
        """Count the last check of a transaction as unanswered, if no answer was received.

        Call this when the next check is due. The number of unanswered checks in a row of the asked
        connection is increased, and `transaction.asked_peer` becomes None. The first unanswered
        check of a client is logged. Nothing is counted if there was no check, if it was answered,
        or if the connection is closed. `record` is the transaction's newest prepared message.
        """
        peer = transaction.asked_peer
        transaction.asked_peer = None
        if peer is None or peer.closed:
            return
        self.unanswered_count += 1
        peer.attributes[_UNANSWERED] = _unanswered_count(peer) + 1
        self._log_unanswered_once(record.get_text(PRODUCER_GROUP), peer, transaction)

    def _log_unanswered_once(self, group: str, peer: Peer, transaction: OpenTransaction) -> None:
        """Log that the client at `peer` has not answered a check, once for each client."""
        member = self._producers.groups.get(group, {}).get(peer)
        client_id = member.client_id if member is not None else str(peer.remote)
        group_and_client = group, client_id
        if group_and_client in self._logged_clients or len(self._logged_clients) >= _NAMES_MAX:
            return
        self._logged_clients.add(group_and_client)
        log.warning(
            "client %s of producer group %s has not answered a check of transaction %s: it has "
            "no TransactionListener, or its listener hangs. Give every producer of the group a "
            "listener, or use another group for the producers without one. The next check goes "
            "to another client.",
            client_id,
            group,
            transaction.key,
        )

    def note_answer(self, transaction: OpenTransaction | None, peer: Peer) -> None:
        """Record that the client at `peer` has answered a check.

        Its number of unanswered checks in a row becomes 0. `transaction` is the checked one, or
        None if it is no longer open.
        """
        peer.attributes.pop(_UNANSWERED, None)
        if transaction is not None:
            transaction.asked_peer = None


class WaitingChecks:
    """Open transactions whose check was due while no client of their producer group was connected.

    When a client of the group connects, they are checked at once.
    """

    def __init__(self) -> None:
        """Create a table without any transaction."""
        self._transactions: dict[str, dict[OpenTransaction, None]] = {}
        """By producer group: its transactions, in the order in which they were added."""
        self._joined_groups: dict[str, None] = {}
        """Groups of `_transactions` that a client has joined, the first one first."""

    def add(self, group: str, transaction: OpenTransaction) -> None:
        """Add a transaction of a producer group, to be returned after a client has joined it."""
        transaction.absent_group = group
        self._transactions.setdefault(group, {})[transaction] = None
        self._joined_groups.pop(group, None)

    def discard(self, transaction: OpenTransaction) -> None:
        """Remove a transaction, because it is checked or has ended."""
        group = transaction.absent_group
        if group is None:
            return
        transaction.absent_group = None
        transactions = self._transactions[group]
        transactions.pop(transaction, None)
        if not transactions:
            del self._transactions[group]
            self._joined_groups.pop(group, None)

    def note_join(self, group: str) -> None:
        """Let `pop` return the transactions of a producer group: a client has joined it."""
        if group in self._transactions:
            self._joined_groups[group] = None

    def pop(self) -> OpenTransaction | None:
        """Remove and return a transaction of a group that a client has joined, or return None."""
        for group in self._joined_groups:
            transaction = next(iter(self._transactions[group]))
            self.discard(transaction)
            return transaction
        return None


def _unanswered_count(peer: Peer) -> int:
    """Return how many checks in a row a connection has not answered."""
    return int(peer.attributes.get(_UNANSWERED, 0))


def encode_check(transaction: OpenTransaction, record: Record, broker_name: str) -> Command:
    """Return the request CHECK_TRANSACTION_STATE (39) for a transaction.

    Its body is the message as the producer sent it, in the form of a stored record
    (spec/remoting.md §7.6).
    """
    unique_id = record.get_text(UNIQ_KEY) or None
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
        topic=record.get_text(REAL_TOPIC),
        queue_id=record.get_number(REAL_QUEUE) or 0,
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
