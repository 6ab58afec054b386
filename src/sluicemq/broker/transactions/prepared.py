"""Prepared messages (RocketMQ: half messages) as they lie in the log, and how a send becomes one.

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
check made, or a send that its client repeated because it got no answer.

Facts: spec/delivery.md §3, spec/remoting.md §16.
"""

import hashlib
from collections.abc import Iterator
from typing import Final

from sluicemq.broker.produce.intake import Draft, Intake
from sluicemq.broker.produce.redelivery import Record, entries, read_record
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import HALF_TOPIC, OP_TOPIC
from sluicemq.broker.transactions.open import OpenTransactions, Prepared
from sluicemq.errors import RequestError
from sluicemq.model.ids import tag_code
from sluicemq.model.message import (
    CHECK_IMMUNITY,
    COMMITTED,
    DELAY,
    PRODUCER_GROUP,
    REAL_TOPIC,
    TIMER_PROPERTIES,
    TRAN_MSG,
    TRANSACTION_MASK,
    UNIQ_KEY,
)
from sluicemq.record import codec as text
from sluicemq.record.codec import CHECKSUM_NAME
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode

GROUP: Final = "CID_RMQ_SYS_TRANS"
CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
REAL_QUEUE: Final = "REAL_QID"
TRANSACTION_ID: Final = "__transactionId__"
PREPARED_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
FIRST_OFFSET: Final = "SLUICE_FIRST_HALF"
"""Our own, in copies alone: the offset of the first prepared message of the transaction."""
COPY_BYTES_MAX: Final = 96
"""What the copies of a prepared message may add to its properties."""
OP_PROPERTIES: Final = b"WAIT\x01true\x02TAGS\x01d\x02"
OP_TAG_CODE: Final = tag_code("d")
IMMUNITY_S_MAX: Final = 10 * 365 * 86_400
_DELAYS: Final = (DELAY, *TIMER_PROPERTIES, "TIMER_DEL_UNIQKEY")


def identity(record: Record) -> tuple[str, int]:
    """The id of the transaction of a stored message, and a digest of what else makes it one."""
    parts = (record.text(PRODUCER_GROUP), record.text(REAL_TOPIC), str(record.body_crc))
    digest = hashlib.blake2b("\x01".join(parts).encode(), digest_size=7).digest()
    return record.text(UNIQ_KEY), int.from_bytes(digest, "big")


def prepared_of(record: Record, offset: int) -> Prepared:
    """What a record of the half topic says."""
    checks = record.number(CHECK_TIMES) or 0
    first = record.number(FIRST_OFFSET)
    if first is None:
        first = record.number(PREPARED_OFFSET)
    is_copy = checks > 0 or first is not None
    # The producer's clock may be wrong: it is asked only where ours is not known any more.
    stored_ms = record.store_time_ms
    immunity_s = record.number(CHECK_IMMUNITY)
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


def op_body(offset: int) -> bytes:
    """What is written for one prepared message that is done."""
    return b"%d" % offset


def read_op(body: memoryview) -> list[int]:
    """The offsets of an op of any release; what is no number is passed over."""
    return [int(part) for part in bytes(body).split(b",") if part.isdigit()]


def properties_of(record: Record) -> dict[str, str]:
    """Those of a prepared message as the producer and the rewrite made them, without what copies
    add of our own."""
    properties = record.all_properties()
    properties.pop(CHECKSUM_NAME, None)
    properties.pop(FIRST_OFFSET, None)
    return properties


def draft_of(record: Record, topic: str, queue_id: int, properties: dict[str, str]) -> Draft:
    """The message of a prepared one, for another place."""
    draft = record.draft(topic, queue_id, properties)
    draft.sys_flag &= ~TRANSACTION_MASK
    return draft


class PreparedReader:
    """The two queues as they can be seen."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def prepared(self, offset: int) -> Iterator[Prepared]:
        """The prepared messages from an offset on; units without a record are left out."""
        for entry in entries(self._store, HALF_TOPIC, 0, offset):
            if entry.record is not None:
                yield prepared_of(entry.record, entry.offset)

    def ops(self, offset: int) -> Iterator[tuple[int, list[int]]]:
        """(offset, offsets of prepared messages) of the ops from an offset on."""
        for entry in entries(self._store, OP_TOPIC, 0, offset):
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


class Preparing:
    """A rewrite of the intake, before the delays: a send with TRAN_MSG=true is stored where no
    consumer sees it, and REAL_TOPIC and REAL_QID say where it goes when its transaction is
    committed. `table` is exchanged when the transactions are loaded."""

    def __init__(self, settings: Settings, intake: Intake) -> None:
        self._settings = settings
        self._intake = intake
        self.table = OpenTransactions(0, 0)
        intake.rewrites.insert(0, self.rewrite)

    def rewrite(self, draft: Draft) -> None:
        """Hide a message of a transaction. Raises RequestError."""
        properties = draft.properties
        kind = draft.sys_flag & TRANSACTION_MASK
        if kind == COMMITTED or properties.get(TRAN_MSG, "").lower() != "true":
            return
        if draft.reconsume_times > 0 and properties.get(DELAY, "0") != "0":
            # A consumer gives it back: it was committed long ago (spec/delivery.md §3).
            del properties[TRAN_MSG]
            draft.sys_flag &= ~TRANSACTION_MASK
            return
        self._check(properties)
        properties |= {
            REAL_TOPIC: draft.topic,
            REAL_QUEUE: str(draft.queue_id),
            TRANSACTION_ID: properties.get(UNIQ_KEY, ""),
        }
        self._intake.check_properties(len(text.as_text(properties).encode()) + COPY_BYTES_MAX)
        draft.topic, draft.queue_id = HALF_TOPIC, 0
        draft.sys_flag &= ~TRANSACTION_MASK

    def _check(self, properties: dict[str, str]) -> None:
        config = self._settings.broker
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
        if len(self.table) >= config.transactions_open_max:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"{len(self.table):,} transactions are undecided, the limit is "
                f"{config.transactions_open_max:,} (sluiceTransactionsOpenMax). It was not stored. "
                "See `sluice transaction list` for what they wait for.",
            )
