"""Prepared messages (RocketMQ: half messages): their records, and the table of open transactions.

A send that belongs to a transaction is stored as a prepared message. Everything that happens to a
transaction is a record in the log:

    send            RMQ_SYS_TRANS_HALF_TOPIC: the message, with REAL_TOPIC, REAL_QID and its id
    commit          the real topic: the message, flag COMMITTED, its prepared_offset; and an op
    rollback        an op
    check           a copy of the prepared message at the end of its queue, with its check count
                    plus one; when the copy is visible, an op for the old message
    abandoned       TRANS_CHECK_MAX_TIME_TOPIC: the message; and an op

An *op message* lists offsets of prepared messages that are done: `12,15,` as RocketMQ 5 writes it,
or `12` as RocketMQ 4 does. SluiceMQ writes one offset in each op (`12`), which both read. The
message and the op of a commit are neighbours in the log, so a crash can cut off only the op of the
very last record. `Transactions.load` checks for that.

Two prepared messages belong to the same transaction if their id, producer group, real topic and
body are equal: one is a copy that a check made, or a send that its client repeated because it got
no answer. A transaction is represented by its newest prepared message. Older ones are *superseded*,
and each gets an op.

The table follows from the prepared messages and ops in the order in which they become visible. The
same calls build it at the start and keep it up to date:

    half queue   … done done | open done open …   | not visible yet
                             ^ lowest_half_offset ^ next_half_offset

All messages before `lowest_half_offset` are done, so a start reads from there. The first op that
concerns a message from there on is at `find_lowest_op_offset`. Neither offset ever decreases. The
table takes memory for each open transaction, and two numbers for each op since the lowest one.

Facts about RocketMQ: spec/delivery.md §3, spec/remoting.md §16.
"""

import hashlib
import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from sluicemq.broker.produce.intake import MessageToStore, Record, iter_queue, read_record
from sluicemq.config import BrokerConfig
from sluicemq.errors import RequestError
from sluicemq.model import properties as reserved
from sluicemq.model.ids import tag_code
from sluicemq.model.message import (
    CHECK_IMMUNITY,
    COMMITTED,
    DELAY,
    PRODUCER_GROUP,
    REAL_QUEUE,
    REAL_TOPIC,
    TIMER_PROPERTIES,
    TRAN_MSG,
    TRANSACTION_MASK,
    UNIQ_KEY,
)
from sluicemq.model.system_names import HALF_TOPIC, OP_TOPIC
from sluicemq.net.dispatch import Peer
from sluicemq.record.codec import CHECKSUM_NAME
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode

CHECK_TIMES: Final = reserved.CHECK_TIMES
"""The property that counts the checks of a transaction."""

TRANSACTION_ID: Final = "__transactionId__"
"""The property with the id of the transaction, which is the message id."""

PREPARED_OFFSET: Final = reserved.PREPARED_OFFSET
"""RocketMQ's property, in a copy of a prepared message: the queue offset of the original."""

FIRST_OFFSET: Final = reserved.FIRST_HALF_OFFSET
"""SluiceMQ's property, in a copy: the queue offset of the transaction's first prepared message."""

COPY_BYTES_MAX: Final = 96
"""The number of bytes that a copy may add to the properties of a prepared message."""

OP_PROPERTIES: Final = b"WAIT\x01true\x02TAGS\x01d\x02"
"""The properties of an op message."""

OP_TAG_CODE: Final = tag_code("d")
"""The tag code of an op message."""

IMMUNITY_S_MAX: Final = 10 * 365 * 86_400
"""The largest value of CHECK_IMMUNITY_TIME_IN_SECONDS that counts, in seconds."""

_DELAY_PROPERTIES: Final = (DELAY, *TIMER_PROPERTIES, reserved.TIMER_DELETES)

SPARE_DUE_TIMES: Final = 1024
"""The number of outdated due times that the heap of a table may hold before it is rebuilt."""


class PreparedMessage(NamedTuple):
    """The fields of a prepared message that the table of open transactions needs."""

    offset: int
    """The message's offset in the half queue."""
    first_offset: int
    """The offset of the first prepared message of the same transaction; 0 if it is unknown."""
    physical_offset: int
    """The position of the record in the commit log."""
    unique_id: str
    """The message id, which is the id of the transaction."""
    digest: int
    """The digest that `transaction_identity` returns."""
    started_ms: int
    """The time at which the first prepared message was stored, or born if that is unknown."""
    stored_ms: int
    """The time at which this message was stored."""
    check_count: int
    """The number of checks that this message has counted."""
    immunity_ms: int | None
    """The time that the producer demands before the first check; None if it demands none."""


def transaction_identity(record: Record) -> tuple[str, int]:
    """Return (message id, digest), which identify the transaction of a prepared message.

    The digest is computed from the producer group, the topic and the CRC of the body. Two prepared
    messages belong to the same transaction if both values are equal.
    """
    group = record.get_text(PRODUCER_GROUP)
    topic = record.get_text(REAL_TOPIC)
    digested = f"{group}\x01{topic}\x01{record.body_crc}".encode()
    digest = hashlib.blake2b(digested, digest_size=7).digest()
    return record.get_text(UNIQ_KEY), int.from_bytes(digest, "big")


def parse_prepared(record: Record, offset: int) -> PreparedMessage:
    """Parse a record of the half topic, where messages of open transactions wait.

    `offset` is the offset of the message in the half queue. The broker appends copies of a prepared
    message there. A record is a copy if it has a number of checks, or the offset of the first
    message of the transaction, which is `first_offset` in the result (0 if it is unknown).
    """
    check_count = record.get_number(CHECK_TIMES) or 0
    noted_first_offset = record.get_number(FIRST_OFFSET)
    if noted_first_offset is None:
        noted_first_offset = record.get_number(PREPARED_OFFSET)
    is_copy = check_count > 0 or noted_first_offset is not None

    first_offset = offset
    started_ms = record.store_time_ms
    if is_copy:
        first_offset = noted_first_offset or 0
        # The store time of the original is unknown to a copy. The born time comes from the
        # producer's clock, which may be wrong, so it is used only then.
        started_ms = min(record.born_time_ms, record.store_time_ms)

    immunity_ms = None
    immunity_s = record.get_number(CHECK_IMMUNITY)
    if immunity_s is not None:
        immunity_ms = min(immunity_s, IMMUNITY_S_MAX) * 1000

    unique_id, digest = transaction_identity(record)
    return PreparedMessage(
        offset=offset,
        first_offset=first_offset,
        physical_offset=record.physical_offset,
        unique_id=unique_id,
        digest=digest,
        started_ms=started_ms,
        stored_ms=record.store_time_ms,
        check_count=check_count,
        immunity_ms=immunity_ms,
    )


def parse_op(body: memoryview) -> list[int]:
    """Return the offsets of prepared messages in the body of an op message.

    The body is `12,15,` or `12`. Parts that are not numbers are skipped, so the list may be empty.
    """
    return [int(offset) for offset in bytes(body).split(b",") if offset.isdigit()]


def original_properties(record: Record) -> dict[str, str]:
    """Return the properties of a prepared message as its producer sent them.

    The properties that SluiceMQ adds to copies of the message are removed.
    """
    properties = record.decode_properties()
    properties.pop(CHECKSUM_NAME, None)
    properties.pop(FIRST_OFFSET, None)
    return properties


def copy_prepared_to(
    record: Record, topic: str, queue_id: int, properties: dict[str, str]
) -> MessageToStore:
    """Return a copy of a prepared message for a queue, without its transaction flags."""
    message = record.copy_to(topic, queue_id, properties)
    message.sys_flag &= ~TRANSACTION_MASK
    return message


class OpenTransaction:
    """An open transaction, represented by its newest visible prepared message."""

    __slots__ = (
        "absent_group",
        "asked_peer",
        "check_count",
        "copy_offset",
        "digest",
        "due_ms",
        "first_offset",
        "is_check_pending",
        "is_ending",
        "key",
        "offset",
        "physical_offset",
        "started_ms",
        "unique_id",
    )

    def __init__(self, key: str, message: PreparedMessage) -> None:
        """Create an open transaction, whose newest prepared message is `message`.

        `key` is the id by which operators name it. No check is scheduled.
        """
        self.key = key
        """The id by which operators name the transaction; unique among the open ones."""
        self.unique_id = message.unique_id
        self.digest = message.digest
        self.first_offset = message.first_offset
        self.started_ms = message.started_ms
        self.due_ms = 0
        """The time of the next check, in ms of the steady clock. `OpenTransactions.schedule` sets
        it."""
        self.copy_offset: int | None = None
        """The queue offset of a copy that was appended and is not visible yet."""
        self.asked_peer: Peer | None = None
        """The connection to which the last check was sent, until the client answers."""
        self.absent_group: str | None = None
        """The producer group, while a check waits for its first client. `WaitingChecks` sets it."""
        self.is_ending = False
        """Whether an op was appended that is not visible yet."""
        self.is_check_pending = False
        """Whether a check is sent when the copy becomes visible."""
        self.set_newest_message(message)

    def set_newest_message(self, message: PreparedMessage) -> None:
        """Represent the transaction by a newer prepared message, with its check count."""
        self.offset = message.offset
        self.physical_offset = message.physical_offset
        self.check_count = message.check_count


class OpenTransactions:
    """The table of all open transactions. Iteration follows the offsets of their messages."""

    def __init__(self, half_start: int, op_start: int) -> None:
        """Create an empty table of open transactions.

        The caller fills it from two queues: the half queue, with messages of transactions, and the
        op queue, with messages that list ended transactions. `half_start` and `op_start` are the
        offsets at which it begins to read them.
        """
        self._by_offset: dict[int, OpenTransaction] = {}  # in ascending order of offsets
        self._by_key: dict[str, OpenTransaction] = {}
        self._due: list[tuple[int, int]] = []
        """A heap of due times and offsets; entries of an earlier schedule are outdated."""
        self._ops: deque[tuple[int, int]] = deque()
        """For each op: its offset, and the highest offset of a message that it lists."""
        self.next_half_offset = half_start
        """The offset of the next message of the half queue to add."""
        self.next_op_offset = op_start
        """The offset of the next op to add."""

    def __len__(self) -> int:
        return len(self._by_offset)

    def __iter__(self) -> Iterator[OpenTransaction]:
        return iter(self._by_offset.values())

    def get(self, offset: int) -> OpenTransaction | None:
        """Return the open transaction whose newest message is at `offset` of the half queue.

        Return None if there is none, also for the offset of a superseded message.
        """
        return self._by_offset.get(offset)

    def find(self, unique_id: str, digest: int | None = None) -> OpenTransaction | None:
        """Return the open transaction with this id, or None.

        Several open transactions may have the same id. Then `digest` selects one of them. Without
        `digest`, the result is the one whose key is `unique_id`.
        """
        transaction = self._by_key.get(unique_id)
        if digest is not None and (transaction is None or transaction.digest != digest):
            transaction = self._by_key.get(_second_key(unique_id, digest))
        return transaction

    def find_for_message(self, message: PreparedMessage) -> OpenTransaction | None:
        """Return the open transaction to which a prepared message belongs, or None.

        The message need not be the newest one of the transaction. If it was stored before the
        transaction began, it belongs to an earlier transaction with the same id, which has ended,
        and the result is None.
        """
        transaction = self._by_offset.get(message.offset)
        if transaction is None and message.unique_id:
            transaction = self.find(message.unique_id, message.digest)
        if transaction is None or message.offset < transaction.first_offset:
            return None
        return transaction

    # --- messages and ops, in the order of their queues

    def add(self, message: PreparedMessage) -> tuple[OpenTransaction, int | None]:
        """Add the next prepared message of the half queue, and advance `next_half_offset` over it.

        The half queue contains the messages of open transactions, which no consumer sees, and
        copies of them. The message becomes the newest one of the open transaction with the same id
        and digest. If there is none, it begins a new transaction. Return (transaction, superseded
        offset). The second value is the offset of the previous newest message, or None for a new
        transaction.

        If the transaction is ending, its producer has sent the same message a second time, and the
        message begins a new transaction as well. A copy that the broker has appended does not.
        """
        self.next_half_offset = message.offset + 1
        transaction = None
        if message.unique_id:
            transaction = self.find(message.unique_id, message.digest)
        superseded_offset = None
        if transaction is None or (
            transaction.is_ending and transaction.copy_offset != message.offset
        ):
            transaction = OpenTransaction(self._choose_key(message), message)
            self._by_key[transaction.key] = transaction
        else:
            superseded_offset = transaction.offset
            del self._by_offset[superseded_offset]
            transaction.set_newest_message(message)
        self._by_offset[message.offset] = transaction
        return transaction, superseded_offset

    def _choose_key(self, message: PreparedMessage) -> str:
        """Return a key for a new transaction that no other open transaction has.

        It is the id of the message, if that is not taken. Otherwise it is the id with the digest,
        or else the id with the offset of the message.
        """
        unique_id = message.unique_id
        if unique_id:
            for key in (unique_id, _second_key(unique_id, message.digest)):
                if key not in self._by_key:
                    return key
        return f"{unique_id}@{message.offset}"

    def add_op(self, op_offset: int, offsets: Sequence[int]) -> None:
        """Add the op at `op_offset` of the op queue, and advance `next_op_offset` over it.

        An op is a message that lists ended transactions, by the `offsets` of their newest messages
        in the half queue. These transactions are removed. Offsets of other messages have no effect
        on the table.
        """
        self.next_op_offset = op_offset + 1
        if offsets:
            self._ops.append((op_offset, max(offsets)))
        for offset in offsets:
            self.mark_done(offset)

    def mark_done(self, offset: int) -> None:
        """Remove the transaction whose newest message has this offset, if there is one."""
        transaction = self._by_offset.pop(offset, None)
        if transaction is not None:
            del self._by_key[transaction.key]

    @property
    def lowest_half_offset(self) -> int:
        """The offset of the half queue before which every transaction has ended.

        It is the offset of the first open transaction, or `next_half_offset` if none is open.
        """
        return next(iter(self._by_offset), self.next_half_offset)

    def find_lowest_op_offset(self, half_offset: int) -> int:
        """Return the offset of the first op that lists a message at `half_offset` or later.

        An op lists ended transactions by offsets of the half queue. Return `next_op_offset` if no
        op lists such a message. The ops before the result are forgotten, so `half_offset` must not
        be lower in a later call.
        """
        ops = self._ops
        while ops:
            op_offset, highest_half_offset = ops[0]
            if highest_half_offset >= half_offset:
                return op_offset
            ops.popleft()
        return self.next_op_offset

    # --- due times

    def schedule(self, transaction: OpenTransaction, due_ms: int) -> None:
        """Set the time of the next check of a transaction to `due_ms` of the steady clock.

        An earlier time of the transaction becomes invalid. Invalid entries of the heap are removed
        when there are too many.
        """
        transaction.due_ms = due_ms
        heapq.heappush(self._due, (due_ms, transaction.offset))
        if len(self._due) > 2 * len(self._by_offset) + SPARE_DUE_TIMES:
            self._due = [(scheduled.due_ms, scheduled.offset) for scheduled in self]
            heapq.heapify(self._due)

    def pop_due(self, now_ms: int) -> OpenTransaction | None:
        """Remove the transaction whose check is due first from the heap, and return it.

        Return None if no check is due at `now_ms`. The caller must schedule the transaction again.
        Transactions that are ending need no check: they are removed from the heap, too.
        """
        while self._due and self._due[0][0] <= now_ms:
            due_ms, offset = heapq.heappop(self._due)
            transaction = self._by_offset.get(offset)
            if transaction is None or transaction.is_ending:
                continue
            is_outdated = transaction.due_ms != due_ms
            if not is_outdated:
                return transaction
        return None


def _second_key(unique_id: str, digest: int) -> str:
    """Return the key of a transaction whose id is already the key of another open transaction.

    The key is `<id>#<digest in hexadecimal digits>`.
    """
    return f"{unique_id}#{digest:x}"


class PreparedReader:
    """Reads the visible messages of the half queue and the op queue."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def iter_prepared(self, offset: int) -> Iterator[PreparedMessage]:
        """Yield the visible messages of the half queue from `offset` on.

        Messages whose record is missing are skipped.
        """
        for entry in iter_queue(self._store, HALF_TOPIC, 0, offset):
            if entry.record is not None:
                yield parse_prepared(entry.record, entry.offset)

    def iter_ops(self, offset: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (op offset, half offsets) for each visible op from `offset` of the op queue on.

        The half offsets are those that the op lists; the list may be empty. Ops whose record is
        missing are skipped.
        """
        for entry in iter_queue(self._store, OP_TOPIC, 0, offset):
            if entry.record is not None:
                yield entry.offset, parse_op(entry.record.body)

    def read_record(self, physical_offset: int) -> Record | None:
        """Return the record at a position of the commit log that was taken from a queue.

        The position is not checked. Return None if retention has deleted the record.
        """
        return read_record(self._store.reader.view_at(physical_offset))

    def find_prepared(self, physical_offset: int) -> Record | None:
        """Return the record of the prepared message at a position of the commit log.

        A client names the position, so it may be any number. Return None if no prepared message
        begins there.
        """
        record_bytes = self._store.reader.record_at(physical_offset)
        if record_bytes is None:
            return None
        record = read_record(memoryview(record_bytes))
        if record is None or record.topic != HALF_TOPIC:
            return None
        return record

    def read_last_record(self) -> Record | None:
        """Return the last record of the commit log that is in a queue; None if there is none.

        It is the one with the highest position among the last messages of all queues.
        """
        last_position = -1
        for topic, queue_id in self._store.queues():
            _, end_offset = self._store.queue_offsets(topic, queue_id)
            # The last unit: a 20-byte entry with position and size of a record, and its tag code.
            last_unit = self._store.reader.units(topic, queue_id, end_offset - 1, 1)
            if not len(last_unit):
                continue
            position, size_bytes, _ = UNIT.unpack_from(last_unit)
            if size_bytes != BLANK_SIZE:
                last_position = max(last_position, position)
        return self.read_record(last_position)


def convert_to_prepared(message: MessageToStore, config: BrokerConfig, open_count: int) -> bool:
    """Redirect a message that begins a transaction to the half topic, where no consumer sees it.

    The property TRAN_MSG=true marks such a message. Its own topic and queue are kept in the
    properties REAL_TOPIC and REAL_QID. Properties by which it would look like a copy of a prepared
    message are removed.

    Return True if the message was redirected. Return False for every other message. It stays
    unchanged, except that a message that a consumer sends back for a retry loses TRAN_MSG.

    `open_count` is the number of open transactions. Raises RequestError if a message may not begin
    a transaction.
    """
    properties = message.properties
    is_committed = (message.sys_flag & TRANSACTION_MASK) == COMMITTED
    if is_committed or properties.get(TRAN_MSG, "").lower() != "true":
        return False
    is_sent_back = message.reconsume_times > 0 and properties.get(DELAY, "0") != "0"
    if is_sent_back:
        # A consumer sends it back for a retry: it was committed long ago (spec/delivery.md §3).
        del properties[TRAN_MSG]
        message.sys_flag &= ~TRANSACTION_MASK
        return False

    _check_may_begin(properties, config, open_count)
    # With these the message would look like a copy of another transaction's message.
    for name in reserved.PREPARED_COPY_PROPERTIES:
        properties.pop(name, None)
    properties |= {
        REAL_TOPIC: message.topic,
        REAL_QUEUE: str(message.queue_id),
        TRANSACTION_ID: properties.get(UNIQ_KEY, ""),
    }
    message.topic = HALF_TOPIC
    message.queue_id = 0
    message.sys_flag &= ~TRANSACTION_MASK
    return True


def _check_may_begin(properties: dict[str, str], config: BrokerConfig, open_count: int) -> None:
    """Raise RequestError if a message with these properties may not begin a transaction.

    It may not if transactions are disabled, if the message is delayed or has no producer group, or
    if `open_count`, the number of open transactions, has reached its limit.
    """
    if config.reject_transactions:
        raise RequestError(
            ResponseCode.NO_PERMISSION,
            f"the broker[{config.broker_name}] sending transaction message is forbidden "
            "(rejectTransactionMessage).",
        )
    for name in _DELAY_PROPERTIES:
        if properties.get(name, "0") != "0":
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a message of a transaction cannot be delayed (property {name}="
                f"{properties[name]}). It was not stored. Commit it when it is due, or send a "
                "delayed message without a transaction.",
            )
    if not properties.get(PRODUCER_GROUP):
        raise RequestError(
            ResponseCode.MESSAGE_ILLEGAL,
            "a message of a transaction has no producer group (property PGROUP), so the broker "
            "could not ask any producer how the transaction ended. It was not stored.",
        )
    if open_count >= config.transactions_open_max:
        raise RequestError(
            ResponseCode.SYSTEM_BUSY,
            f"{open_count:,} transactions are undecided, the limit is "
            f"{config.transactions_open_max:,} (sluiceTransactionsOpenMax). The message was not "
            'stored. List them with "sluice transaction list" to see what they wait for.',
        )
