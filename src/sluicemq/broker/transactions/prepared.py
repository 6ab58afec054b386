"""Prepared messages (RocketMQ: half messages) as they lie in the log, how a send becomes one, and
which transactions are still open.

    send            RMQ_SYS_TRANS_HALF_TOPIC: the message, with REAL_TOPIC, REAL_QID and its id
    commit          the real topic: the message, flag COMMITTED, its prepared_offset; an op
    rollback        an op
    check           the prepared message once more at the end of its queue, with one check more;
                    when that one can be seen, an op for the old one
    given up        TRANS_CHECK_MAX_TIME_TOPIC: the message; an op

An op says which prepared messages (offsets in their queue) are done: `12,15,` as RocketMQ 5 writes
them, `12` as RocketMQ 4 does. We write one at a time, `12`, which both of them read. Message and op
of an end are neighbours in the log, so a crash can lose the op of the very last record only:
`Transactions.load` looks there.

Two prepared messages are one transaction when id, group, real topic and body agree: a copy that a
check made, or a send that its client repeated because it got no answer. A transaction is known by
its newest prepared message; an older one of it is superseded, and wants an op of its own.

What is open follows from prepared messages and ops in the order in which they can be seen: the same
calls build the table at the start and keep it up to date.

    half queue   … done done | open done open … | not seen yet
                             ^ half_low         ^ half_next

Before `half_low` everything is done, so a start reads from there; `op_low` is the first op that
says something of a message from there on. Both only go forward. Memory: the open transactions, and
a pair of numbers for each op since `op_low`.

Facts: spec/delivery.md §3, spec/remoting.md §16.
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
TRANSACTION_ID: Final = "__transactionId__"
PREPARED_OFFSET: Final = reserved.PREPARED_OFFSET
FIRST_OFFSET: Final = reserved.FIRST_HALF_OFFSET
COPY_BYTES_MAX: Final = 96
"""What the copies of a prepared message may add to its properties."""
OP_PROPERTIES: Final = b"WAIT\x01true\x02TAGS\x01d\x02"
OP_TAG_CODE: Final = tag_code("d")
IMMUNITY_S_MAX: Final = 10 * 365 * 86_400
_DELAYS: Final = (DELAY, *TIMER_PROPERTIES, reserved.TIMER_DELETES)
HEAP_SPARE: Final = 1024


class Prepared(NamedTuple):
    """What has to be known of a prepared message. `first_offset` is that of the first one of its
    transaction, 0 when nothing says it; `began_ms` is when that one was stored; `immunity_ms` how
    long its producer asked not to be asked."""

    offset: int
    first_offset: int
    physical_offset: int
    unique_id: str
    digest: int
    began_ms: int
    stored_ms: int
    checks: int
    immunity_ms: int | None


def identity(record: Record) -> tuple[str, int]:
    """The id of the transaction of a stored message, and a digest of what else makes it one."""
    parts = (record.get_text(PRODUCER_GROUP), record.get_text(REAL_TOPIC), str(record.body_crc))
    digest = hashlib.blake2b("\x01".join(parts).encode(), digest_size=7).digest()
    return record.get_text(UNIQ_KEY), int.from_bytes(digest, "big")


def prepared_of(record: Record, offset: int) -> Prepared:
    """What a record of the half topic says."""
    checks = record.get_number(CHECK_TIMES) or 0
    first = record.get_number(FIRST_OFFSET)
    if first is None:
        first = record.get_number(PREPARED_OFFSET)
    is_copy = checks > 0 or first is not None
    # The producer's clock may be wrong: it is asked only where ours is not known any more.
    stored_ms = record.store_time_ms
    immunity_s = record.get_number(CHECK_IMMUNITY)
    return Prepared(
        offset,
        (first or 0) if is_copy else offset,
        record.physical_offset,
        *identity(record),
        min(record.born_time_ms, stored_ms) if is_copy else stored_ms,
        stored_ms,
        checks,
        None if immunity_s is None else min(immunity_s, IMMUNITY_S_MAX) * 1000,
    )


def read_op(body: memoryview) -> list[int]:
    """The offsets of an op of any release; what is no number is passed over."""
    return [int(part) for part in bytes(body).split(b",") if part.isdigit()]


def properties_of(record: Record) -> dict[str, str]:
    """Those of a prepared message as the producer and the rewrite made them, without what copies
    add of our own."""
    properties = record.decode_properties()
    properties.pop(CHECKSUM_NAME, None)
    properties.pop(FIRST_OFFSET, None)
    return properties


def draft_of(
    record: Record, topic: str, queue_id: int, properties: dict[str, str]
) -> MessageToStore:
    """The message of a prepared one, for another place."""
    draft = record.copy_to(topic, queue_id, properties)
    draft.sys_flag &= ~TRANSACTION_MASK
    return draft


class OpenTransaction:
    """An open transaction, by its newest prepared message that can be seen.

    `copy_offset` is that of a copy which cannot be seen yet, and `wants_check` says that it was
    written to be asked about; `is_ending` says that an end is written which cannot be seen yet;
    `asked` is who was asked last and has not answered.
    """

    __slots__ = (
        "asked", "began_ms", "checks", "copy_offset", "digest", "due_ms", "first_offset",
        "is_ending", "key", "offset", "physical_offset", "unique_id", "wants_check",
    )  # fmt: skip

    def __init__(self, key: str, message: Prepared) -> None:
        self.key = key
        self.unique_id = message.unique_id
        self.digest = message.digest
        self.first_offset = message.first_offset
        self.began_ms = message.began_ms
        self.due_ms = 0
        self.copy_offset: int | None = None
        self.asked: Peer | None = None
        self.is_ending = False
        self.wants_check = False
        self.moved(message)

    def moved(self, message: Prepared) -> None:
        """It has a newer message."""
        self.offset = message.offset
        self.physical_offset = message.physical_offset
        self.checks = message.checks


class OpenTransactions:
    """All open transactions. Iteration goes by the offsets of their messages."""

    def __init__(self, half_start: int, op_start: int) -> None:
        self._by_offset: dict[int, OpenTransaction] = {}  # the lowest offset first
        self._by_key: dict[str, OpenTransaction] = {}
        self._due: list[tuple[int, int]] = []
        self._ops: deque[tuple[int, int]] = deque()
        self.half_next = half_start
        self.op_next = op_start

    def __len__(self) -> int:
        return len(self._by_offset)

    def __iter__(self) -> Iterator[OpenTransaction]:
        return iter(self._by_offset.values())

    def at(self, offset: int) -> OpenTransaction | None:
        """The one whose newest message has this offset."""
        return self._by_offset.get(offset)

    def find(self, unique_id: str, digest: int | None = None) -> OpenTransaction | None:
        """By its id; with a digest only the very one."""
        found = self._by_key.get(unique_id)
        if digest is not None and (found is None or found.digest != digest):
            found = self._by_key.get(_second_key(unique_id, digest))
        return found

    def of(self, message: Prepared) -> OpenTransaction | None:
        """The transaction that this message, or an older one of it, belongs to."""
        found = self._by_offset.get(message.offset)
        if found is None and message.unique_id:
            found = self.find(message.unique_id, message.digest)
        return None if found is None or message.offset < found.first_offset else found

    # --- messages and ops in their order

    def add(self, message: Prepared) -> tuple[OpenTransaction, int | None]:
        """A message that is not done, and the offset that it supersedes.

        One that looks like a transaction which is ending just now, and is not its copy, is another
        one: its producer sends the same message object in a second transaction.
        """
        self.half_next = message.offset + 1
        unique_id, digest = message.unique_id, message.digest
        found = self.find(unique_id, digest) if unique_id else None
        old_offset = None
        if found is None or (found.is_ending and found.copy_offset != message.offset):
            keys = (unique_id, _second_key(unique_id, digest)) if unique_id else ()
            free = (key for key in keys if key not in self._by_key)
            found = OpenTransaction(next(free, f"{unique_id}@{message.offset}"), message)
            self._by_key[found.key] = found
        else:
            old_offset = found.offset
            del self._by_offset[old_offset]
            found.moved(message)
        self._by_offset[message.offset] = found
        return found, old_offset

    def op(self, op_offset: int, offsets: Sequence[int]) -> None:
        """An op: the messages at these offsets are done."""
        self.op_next = op_offset + 1
        if offsets:
            self._ops.append((op_offset, max(offsets)))
        for offset in offsets:
            self.close(offset)

    def close(self, offset: int) -> None:
        """This message is done; and with the newest message its transaction."""
        found = self._by_offset.pop(offset, None)
        if found is not None:
            del self._by_key[found.key]

    @property
    def half_low(self) -> int:
        """Everything before is done."""
        return next(iter(self._by_offset), self.half_next)

    def op_low(self, half_low: int) -> int:
        """The ops before say nothing of messages from `half_low` on."""
        ops = self._ops
        while ops and ops[0][1] < half_low:
            ops.popleft()
        return ops[0][0] if ops else self.op_next

    # --- when

    def plan(self, transaction: OpenTransaction, due_ms: int) -> None:
        """It is due then, and at no other time."""
        transaction.due_ms = due_ms
        heapq.heappush(self._due, (due_ms, transaction.offset))
        if len(self._due) > 2 * len(self._by_offset) + HEAP_SPARE:
            self._due = [(one.due_ms, one.offset) for one in self]
            heapq.heapify(self._due)

    def pop_due(self, now_ms: int) -> OpenTransaction | None:
        """One that is due; whoever gets it plans it anew."""
        while self._due and self._due[0][0] <= now_ms:
            due_ms, offset = heapq.heappop(self._due)
            found = self._by_offset.get(offset)
            if found is not None and found.due_ms == due_ms and not found.is_ending:
                return found
        return None


def _second_key(unique_id: str, digest: int) -> str:
    """Of a transaction whose id another open one has too."""
    return f"{unique_id}#{digest:x}"


class PreparedReader:
    """The two queues as they can be seen."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def prepared(self, offset: int) -> Iterator[Prepared]:
        """The prepared messages from an offset on; units without a record are left out."""
        for entry in iter_queue(self._store, HALF_TOPIC, 0, offset):
            if entry.record is not None:
                yield prepared_of(entry.record, entry.offset)

    def ops(self, offset: int) -> Iterator[tuple[int, list[int]]]:
        """(offset, offsets of prepared messages) of the ops from an offset on."""
        for entry in iter_queue(self._store, OP_TOPIC, 0, offset):
            if entry.record is not None:
                yield entry.offset, read_op(entry.record.body)

    def record(self, physical_offset: int) -> Record | None:
        """The record of a message that is known from its queue; None when it is deleted."""
        return read_record(self._store.reader.view_at(physical_offset))

    def named(self, physical_offset: int) -> Record | None:
        """The prepared message at a place that a client names; None when none begins there."""
        data = self._store.reader.record_at(physical_offset)
        record = read_record(None if data is None else memoryview(data))
        return record if record is not None and record.topic == HALF_TOPIC else None

    def last(self) -> Record | None:
        """The last record of the log that stands in a queue; None without one."""
        position = -1
        for topic, queue_id in self._store.queues():
            end = self._store.queue_offsets(topic, queue_id)[1]
            units = self._store.reader.units(topic, queue_id, end - 1, 1)
            if len(units):
                last, size, _ = UNIT.unpack_from(units)
                position = max(position, -1 if size == BLANK_SIZE else last)
        return self.record(position)


def hide(draft: MessageToStore, config: BrokerConfig, open_count: int) -> bool:
    """Makes a send with TRAN_MSG=true one to where no consumer sees it; REAL_TOPIC and REAL_QID say
    where it goes when its transaction is committed. Says whether it is one. Raises RequestError."""
    properties = draft.properties
    kind = draft.sys_flag & TRANSACTION_MASK
    if kind == COMMITTED or properties.get(TRAN_MSG, "").lower() != "true":
        return False
    if draft.reconsume_times > 0 and properties.get(DELAY, "0") != "0":
        # A consumer gives it back: it was committed long ago (spec/delivery.md §3).
        del properties[TRAN_MSG]
        draft.sys_flag &= ~TRANSACTION_MASK
        return False
    _check(properties, config, open_count)
    for (
        name
    ) in reserved.PREPARED_COPY_PROPERTIES:  # else it would pass for a copy of another transaction
        properties.pop(name, None)
    properties |= {
        REAL_TOPIC: draft.topic,
        REAL_QUEUE: str(draft.queue_id),
        TRANSACTION_ID: properties.get(UNIQ_KEY, ""),
    }
    draft.topic, draft.queue_id = HALF_TOPIC, 0
    draft.sys_flag &= ~TRANSACTION_MASK
    return True


def _check(properties: dict[str, str], config: BrokerConfig, open_count: int) -> None:
    if config.reject_transactions:
        raise RequestError(
            ResponseCode.NO_PERMISSION,
            f"the broker[{config.broker_name}] sending transaction message is forbidden "
            "(rejectTransactionMessage).",
        )
    for name in _DELAYS:
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
            "a message of a transaction has no producer group (property PGROUP): nobody could "
            "be asked how it ended. It was not stored.",
        )
    if open_count >= config.transactions_open_max:
        raise RequestError(
            ResponseCode.SYSTEM_BUSY,
            f"{open_count:,} transactions are undecided, the limit is "
            f"{config.transactions_open_max:,} (sluiceTransactionsOpenMax). It was not stored. "
            "See `sluice transaction list` for what they wait for.",
        )
