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
    """Return the message id of a prepared message, and a digest of its group, topic and body.

    Two prepared messages belong to the same transaction if both values are equal.
    """
    parts = (record.get_text(PRODUCER_GROUP), record.get_text(REAL_TOPIC), str(record.body_crc))
    digest = hashlib.blake2b("\x01".join(parts).encode(), digest_size=7).digest()
    return record.get_text(UNIQ_KEY), int.from_bytes(digest, "big")


def parse_prepared(record: Record, offset: int) -> PreparedMessage:
    """Return the prepared message in a record of the half topic, whose queue offset is `offset`."""
    check_count = record.get_number(CHECK_TIMES) or 0
    first = record.get_number(FIRST_OFFSET)
    if first is None:
        first = record.get_number(PREPARED_OFFSET)
    is_copy = check_count > 0 or first is not None
    stored_ms = record.store_time_ms
    # The store time of the original is unknown to a copy. The born time comes from the producer's
    # clock, which may be wrong, so it is used only then.
    started_ms = min(record.born_time_ms, stored_ms) if is_copy else stored_ms
    immunity_s = record.get_number(CHECK_IMMUNITY)
    unique_id, digest = transaction_identity(record)
    return PreparedMessage(
        offset=offset,
        first_offset=(first or 0) if is_copy else offset,
        physical_offset=record.physical_offset,
        unique_id=unique_id,
        digest=digest,
        started_ms=started_ms,
        stored_ms=stored_ms,
        check_count=check_count,
        immunity_ms=None if immunity_s is None else min(immunity_s, IMMUNITY_S_MAX) * 1000,
    )


def parse_op(body: memoryview) -> list[int]:
    """Return the offsets in the body of an op message of any release; skip what is not a number."""
    return [int(part) for part in bytes(body).split(b",") if part.isdigit()]


def original_properties(record: Record) -> dict[str, str]:
    """Return the properties of a prepared message without those that SluiceMQ adds to copies."""
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
        self.key = key
        """The id by which operators name the transaction; unique among the open ones."""
        self.unique_id = message.unique_id
        self.digest = message.digest
        self.first_offset = message.first_offset
        self.started_ms = message.started_ms
        self.due_ms = 0
        """The time at which it is checked next, in ms of the steady clock."""
        self.copy_offset: int | None = None
        """The queue offset of a copy that was appended and is not visible yet."""
        self.asked_peer: Peer | None = None
        """The connection to which the last check was sent, until the client answers."""
        self.is_ending = False
        """Whether an op was appended that is not visible yet."""
        self.is_check_pending = False
        """Whether a check is sent when the copy becomes visible."""
        self.set_newest_message(message)

    def set_newest_message(self, message: PreparedMessage) -> None:
        """Represent the transaction by a newer message of it."""
        self.offset = message.offset
        self.physical_offset = message.physical_offset
        self.check_count = message.check_count


class OpenTransactions:
    """The table of all open transactions. Iteration follows the offsets of their messages."""

    def __init__(self, half_start: int, op_start: int) -> None:
        """Create an empty table whose queues are read from these offsets on."""
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
        """Return the transaction whose newest message has this offset, or None."""
        return self._by_offset.get(offset)

    def find(self, unique_id: str, digest: int | None = None) -> OpenTransaction | None:
        """Return the transaction with this id, or None.

        Several transactions may have the same id; `digest` selects one of them.
        """
        found = self._by_key.get(unique_id)
        if digest is not None and (found is None or found.digest != digest):
            found = self._by_key.get(_second_key(unique_id, digest))
        return found

    def find_for_message(self, message: PreparedMessage) -> OpenTransaction | None:
        """Return the open transaction to which a message belongs, or None.

        The message may be superseded.
        """
        found = self._by_offset.get(message.offset)
        if found is None and message.unique_id:
            found = self.find(message.unique_id, message.digest)
        return None if found is None or message.offset < found.first_offset else found

    # --- messages and ops, in the order of their queues

    def add(self, message: PreparedMessage) -> tuple[OpenTransaction, int | None]:
        """Add a prepared message that is not done.

        Return its transaction, and the offset of the message that it supersedes or None.

        A message that equals a transaction which is ending, and is not the copy of it, begins a
        new transaction: its producer has sent the same message object a second time.
        """
        self.next_half_offset = message.offset + 1
        unique_id, digest = message.unique_id, message.digest
        found = self.find(unique_id, digest) if unique_id else None
        old_offset = None
        if found is None or (found.is_ending and found.copy_offset != message.offset):
            keys = (unique_id, _second_key(unique_id, digest)) if unique_id else ()
            free_keys = (key for key in keys if key not in self._by_key)
            found = OpenTransaction(next(free_keys, f"{unique_id}@{message.offset}"), message)
            self._by_key[found.key] = found
        else:
            old_offset = found.offset
            del self._by_offset[old_offset]
            found.set_newest_message(message)
        self._by_offset[message.offset] = found
        return found, old_offset

    def add_op(self, op_offset: int, offsets: Sequence[int]) -> None:
        """Add the op at `op_offset`: the messages at `offsets` are done."""
        self.next_op_offset = op_offset + 1
        if offsets:
            self._ops.append((op_offset, max(offsets)))
        for offset in offsets:
            self.mark_done(offset)

    def mark_done(self, offset: int) -> None:
        """Remove the transaction whose newest message has this offset, if there is one."""
        found = self._by_offset.pop(offset, None)
        if found is not None:
            del self._by_key[found.key]

    @property
    def lowest_half_offset(self) -> int:
        """The offset before which all prepared messages are done."""
        return next(iter(self._by_offset), self.next_half_offset)

    def find_lowest_op_offset(self, half_offset: int) -> int:
        """Return the offset of the first op that lists a message from `half_offset` on.

        Return the next op's offset if there is none. Forget the ops before; `half_offset` must not
        be smaller in later calls.
        """
        ops = self._ops
        while ops and ops[0][1] < half_offset:
            ops.popleft()
        return ops[0][0] if ops else self.next_op_offset

    # --- due times

    def schedule(self, transaction: OpenTransaction, due_ms: int) -> None:
        """Make a transaction due at `due_ms` of the steady clock, and at no other time."""
        transaction.due_ms = due_ms
        heapq.heappush(self._due, (due_ms, transaction.offset))
        if len(self._due) > 2 * len(self._by_offset) + SPARE_DUE_TIMES:
            self._due = [(one.due_ms, one.offset) for one in self]
            heapq.heapify(self._due)

    def pop_due(self, now_ms: int) -> OpenTransaction | None:
        """Return a transaction that is due and not ending, or None.

        The caller must schedule it again.
        """
        while self._due and self._due[0][0] <= now_ms:
            due_ms, offset = heapq.heappop(self._due)
            found = self._by_offset.get(offset)
            if found is not None and found.due_ms == due_ms and not found.is_ending:
                return found
        return None


def _second_key(unique_id: str, digest: int) -> str:
    """Return the key of a transaction whose id is the key of another open transaction."""
    return f"{unique_id}#{digest:x}"


class PreparedReader:
    """Reads the visible messages of the half queue and the op queue."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def iter_prepared(self, offset: int) -> Iterator[PreparedMessage]:
        """Yield the prepared messages from `offset` on. Skip those whose record is missing."""
        for entry in iter_queue(self._store, HALF_TOPIC, 0, offset):
            if entry.record is not None:
                yield parse_prepared(entry.record, entry.offset)

    def iter_ops(self, offset: int) -> Iterator[tuple[int, list[int]]]:
        """Yield each op from `offset` on as (its offset, offsets of prepared messages)."""
        for entry in iter_queue(self._store, OP_TOPIC, 0, offset):
            if entry.record is not None:
                yield entry.offset, parse_op(entry.record.body)

    def read_record(self, physical_offset: int) -> Record | None:
        """Return the record at a position taken from a queue; None if it has been deleted."""
        return read_record(self._store.reader.view_at(physical_offset))

    def find_prepared(self, physical_offset: int) -> Record | None:
        """Return the prepared message at a position that a client names.

        Return None if no prepared message begins there.
        """
        data = self._store.reader.record_at(physical_offset)
        record = read_record(None if data is None else memoryview(data))
        return record if record is not None and record.topic == HALF_TOPIC else None

    def read_last_record(self) -> Record | None:
        """Return the last record of the log that is in a queue; None if there is none."""
        position = -1
        for topic, queue_id in self._store.queues():
            end = self._store.queue_offsets(topic, queue_id)[1]
            units = self._store.reader.units(topic, queue_id, end - 1, 1)
            if len(units):
                last, size, _ = UNIT.unpack_from(units)
                position = max(position, -1 if size == BLANK_SIZE else last)
        return self.read_record(position)


def convert_to_prepared(message: MessageToStore, config: BrokerConfig, open_count: int) -> bool:
    """Move a message with TRAN_MSG=true to the half topic, where no consumer sees it.

    The properties REAL_TOPIC and REAL_QID then hold the queue to which a commit moves the message.
    Leave every other message unchanged. `open_count` is the number of open transactions.

    Return whether the message was moved. Raises RequestError if it may not begin a transaction.
    """
    properties = message.properties
    kind = message.sys_flag & TRANSACTION_MASK
    if kind == COMMITTED or properties.get(TRAN_MSG, "").lower() != "true":
        return False
    if message.reconsume_times > 0 and properties.get(DELAY, "0") != "0":
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
    message.topic, message.queue_id = HALF_TOPIC, 0
    message.sys_flag &= ~TRANSACTION_MASK
    return True


def _check_may_begin(properties: dict[str, str], config: BrokerConfig, open_count: int) -> None:
    """Raise RequestError if a message with these properties may not begin a transaction."""
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
