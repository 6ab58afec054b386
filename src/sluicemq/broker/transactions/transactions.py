"""Transactions: prepared messages and their ends, in the log and in memory.

    send with TRAN_MSG  ->  prepared, hidden  ->  37 commit    ->  the message, at last
                                              |   37 rollback  ->  nothing
                                              +-  open for too long: a client is asked (39)

State follows from the half and the op queue as they can be seen (`prepared.py`), at the start and
while running alike. An end is a message (of a commit) and an op, next to each other in the log,
written at once and not gathered for seconds as RocketMQ does: an op that was lost in a crash would
let a finished transaction be checked, and committed, once more. When a turn fails, nothing of it
was: what was expected of it is undone.

A second end of a transaction has no effect, whatever message of it it names: never two messages.
What may happen twice all the same is in the page on transactions. Requests are answered in
`requests.py`.

How far the two queues are done is kept as the offsets of CID_RMQ_SYS_TRANS, as RocketMQ does, and
only as far as the disk has it: a start reads from there on.

What time demands is done in slices that the sweep calls. A transaction that is old enough is due.
It is asked about: its message is written once more with one check more, and when that one can be
seen, a client of its group is asked. A check counts when somebody is there to be asked; RocketMQ
counts on, and drops after some minutes what no producer could answer. What was asked about
transactionCheckMax times, or is older than the log is kept, is given up: its message goes to
TRANS_CHECK_MAX_TIME_TOPIC, one line in the log, a counter, a hook.

Stragglers are carried forward: a prepared message that is left far behind is written once more at
the end of its queue. Otherwise one old transaction would make every start read all that came after
it, and its file would be deleted under it.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from itertools import count, islice, takewhile
from typing import Final, NamedTuple

from sluicemq.broker.background import Progress, TimeSlice
from sluicemq.broker.consume.clients import Member, Producers
from sluicemq.broker.group_commit import GroupCommit
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.produce.intake import MessageIntake, MessageToStore, Record
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.broker.transactions.prepared import (
    CHECK_TIMES,
    COPY_BYTES_MAX,
    FIRST_OFFSET,
    OP_PROPERTIES,
    OP_TAG_CODE,
    OpenTransaction,
    OpenTransactions,
    Prepared,
    PreparedReader,
    draft_of,
    hide,
    identity,
    properties_of,
)
from sluicemq.clock import Clock, SteadyClock
from sluicemq.errors import RequestError, StoreError
from sluicemq.model.ids import offset_message_id
from sluicemq.model.message import (
    COMMITTED,
    PRODUCER_GROUP,
    REAL_QUEUE,
    REAL_TOPIC,
    ROLLED_BACK,
    TRANSACTION_MASK,
    UNIQ_KEY,
)
from sluicemq.model.system_names import CHECK_MAX_TOPIC, HALF_TOPIC, OP_TOPIC, TRANSACTION_GROUP
from sluicemq.net.dispatch import Peer
from sluicemq.numbers import natural
from sluicemq.record.codec import encode_record, format_property_text
from sluicemq.store.store import Store
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import CheckTransactionStateRequest

log = logging.getLogger(__name__)

GIVEN_UP: Final = -1
OUTCOMES: Final = {COMMITTED: "committed", ROLLED_BACK: "rolled back", GIVEN_UP: "given up"}
REMEMBERED: Final = 4096
SLICE_S: Final = 0.004
SLICE_TRANSACTIONS: Final = 1024
WINDOW_MESSAGES: Final = 20_000
"""Of the half queue are read at a start; more when a quarter of them is open."""
_HOUR_MS: Final = 3_600_000
_UNANSWERED: Final = "transaction checks without an answer"
_NAMES_MAX: Final = 1024


class GivenUp(NamedTuple):
    """A transaction that nobody would decide; its message lies in TRANS_CHECK_MAX_TIME_TOPIC."""

    unique_id: str
    group: str
    topic: str
    checks: int
    age_ms: int


class CheckBack:
    """Who is asked how a transaction ended, and how the question looks (39).

    Any live connection whose heartbeat names the producer group may be asked: the sender may be
    dead. They take turns. One that was asked and has not answered by the next check (a producer of
    the group without a TransactionListener, or a check that hangs) is named in the log once, and
    the others come before it until it answers.
    """

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
        member = self.choose(record.get_text(PRODUCER_GROUP))
        if member is None:
            return
        transaction.asked = member.peer
        self.sent += 1
        member.peer.send_oneway(question(transaction, record, self._broker_name))

    def overdue(self, transaction: OpenTransaction, record: Record) -> None:
        """The next check is due: has the last one been answered?"""
        peer, transaction.asked = transaction.asked, None
        if peer is None or peer.closed:
            return
        self.unanswered += 1
        peer.attributes[_UNANSWERED] = _unanswered(peer) + 1
        group = record.get_text(PRODUCER_GROUP)
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
        peer.attributes.pop(_UNANSWERED, None)
        if transaction is not None:
            transaction.asked = None


def _unanswered(peer: Peer) -> int:
    return int(peer.attributes.get(_UNANSWERED, 0))


def question(transaction: OpenTransaction, record: Record, broker_name: str) -> Command:
    """39: the prepared message as it was sent, in stored form (spec/remoting.md §7.6)."""
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


class Transactions:
    """All transactions of a broker. `on_given_up` are told of each that is given up."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        offsets: Offsets,
        store: Store,
        intake: MessageIntake,
        group_commit: GroupCommit,
        clock: Clock,
        steady: SteadyClock,
        check_back: CheckBack,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._offsets = offsets
        self._store = store
        self._intake = intake
        self._group_commit = group_commit
        self._clock = clock
        self._steady = steady
        self.check_back = check_back
        self.reader = PreparedReader(store)
        self.table = OpenTransactions(0, 0)
        self._progress = {HALF_TOPIC: Progress(0), OP_TOPIC: Progress(0)}
        self.is_on = False
        self._superseded: list[int] = []
        self._decided: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._giving_up: dict[int, GivenUp] = {}
        self._complaint = ""
        self.on_given_up: list[Callable[[GivenUp], None]] = []
        self.committed: dict[str, int] = {}
        self.rolled_back: dict[str, int] = {}
        self.given_up = 0
        self.lost = 0
        """Messages that were deleted before their transactions were decided."""

        def prepare(draft: MessageToStore) -> None:
            if hide(draft, settings.broker, len(self.table)):
                intake.check_properties_size(
                    len(format_property_text(draft.properties).encode()) + COPY_BYTES_MAX
                )

        intake.rewrites.insert(0, prepare)  # before the delays

    # ------------------------------------------------------------------------------ the start

    def load(self) -> None:
        """Blocking: read what is open, and write the op that a crash has cut off."""
        half_start, op_start = self._start_of(HALF_TOPIC), self._start_of(OP_TOPIC)
        table = self.table = OpenTransactions(half_start, op_start)
        self._progress = {HALF_TOPIC: Progress(half_start), OP_TOPIC: Progress(op_start)}
        done: set[int] = set()
        for offset, offsets in self.reader.ops(op_start):
            table.op(offset, offsets)
            done.update(one for one in offsets if one >= half_start)
        # All of them, then the ends: one that is done may supersede one whose own op was lost.
        for message in self.reader.prepared(half_start):
            self._add(message)
        for offset in done:
            table.close(offset)
        self._superseded = [offset for offset in self._superseded if offset not in done]
        table.half_next = self._store.queue_offsets(HALF_TOPIC, 0)[1]
        table.op_next = self._store.queue_offsets(OP_TOPIC, 0)[1]
        if self._settings.is_read_only:
            return
        last = self.reader.last()
        if last is not None and (
            last.sys_flag & TRANSACTION_MASK == COMMITTED or last.topic == CHECK_MAX_TOPIC
        ):
            found = table.find(*identity(last))
            if found is not None:  # the last record of the log is a message whose op is missing
                log.info("transaction %s ended just before the broker did", found.unique_id)
                self._append_op(found.offset)
                self._store.commit()
                if self._settings.store.flush_sync:
                    self._store.publish(self._store.sync())
                self._follow()
        self._group_commit.topic_listeners |= {HALF_TOPIC: self._follow, OP_TOPIC: self._follow}
        self.is_on = True
        if len(table):
            log.info("%d transactions are undecided", len(table))

    def _start_of(self, topic: str) -> int:
        start, end = self._store.queue_offsets(topic, 0)
        if self._offsets.document.is_doubtful:  # all ops are there: the queues say what is open
            return start
        known = self._offsets.committed(TRANSACTION_GROUP, topic, 0)
        if known > end:
            log.error(
                "the offset %d of %s is behind its end %d: it begins there", known, topic, end
            )
        return min(max(known, start), end)

    # ---------------------------------------------------------------------------------- the end

    def outcome_of(self, message: Prepared) -> int | None:
        """How a transaction ended lately; None when that is not known any more."""
        return self._decided.get((message.unique_id, message.digest))

    def decide(self, transaction: OpenTransaction, outcome: int) -> None:
        """Commit or roll back one that is open and not ending.

        Raises RequestError, StoreError; then it stays open.
        """
        record = self.reader.record(transaction.physical_offset)
        if record is None:
            raise RequestError(ResponseCode.SYSTEM_ERROR, "its half message is deleted.")
        properties = properties_of(record)
        name = properties.get(REAL_TOPIC, "")
        if outcome == COMMITTED:
            topic, queue_id = self._topics.get(name), natural(properties.get(REAL_QUEUE, ""))
            if topic is None or topic.is_forbidden or queue_id is None:
                raise RequestError(
                    ResponseCode.TOPIC_NOT_EXIST,
                    f"the message cannot be committed: topic[{name}] not exist. Create it again; "
                    "the transaction stays undecided meanwhile.",
                )
            draft = draft_of(record, name, queue_id, properties)
            draft.sys_flag |= COMMITTED
            draft.prepared_offset = transaction.physical_offset
            if not self._intake.delivered_elsewhere.take(name, record.get_text(UNIQ_KEY)):
                stored = self._intake.rewrite_and_append(draft)
                topic.messages_in += 1
                topic.bytes_in += len(record.body) + stored.properties_bytes + topic.record_bytes
        self.end(transaction, outcome)
        counts = self.committed if outcome == COMMITTED else self.rolled_back
        counts[name] = counts.get(name, 0) + 1

    def end(self, transaction: OpenTransaction, outcome: int) -> None:
        """Write the op, right behind the message if there is one."""
        newest = transaction.copy_offset
        self._append_op(transaction.offset if newest is None else newest)
        transaction.is_ending = True
        key = (transaction.unique_id, transaction.digest)
        self._decided[key] = outcome
        if len(self._decided) > REMEMBERED:
            self._decided.popitem(last=False)

        def undo() -> None:
            transaction.is_ending = False
            self._decided.pop(key, None)
            self.table.plan(transaction, self._steady.now_ms() + self.interval_ms)

        self._group_commit.commit_internal(undo)

    def _append_op(self, offset: int) -> None:
        now_ms, host = self._clock.now_ms(), self._settings.store_host
        self._store.writer.append(
            OP_TOPIC, 0, b"%d" % offset, OP_PROPERTIES, OP_TAG_CODE, 0, 0, now_ms, host, host
        )

    def copy(self, transaction: OpenTransaction, record: Record, checks: int) -> None:
        """The message once more, at the end of its queue; asked about when it can be seen, if it
        has one check more. Raises StoreError."""
        properties = properties_of(record)
        if checks:
            properties[CHECK_TIMES] = str(checks)
        properties[FIRST_OFFSET] = str(transaction.first_offset)
        stored = self._intake.append(draft_of(record, HALF_TOPIC, 0, properties))
        transaction.copy_offset = stored.queue_offset
        transaction.wants_check = checks > transaction.checks

        def undo() -> None:
            transaction.copy_offset = None
            transaction.wants_check = False

        self._group_commit.commit_internal(undo)

    # -------------------------------------------------------------------- what has become visible

    def _follow(self, _queue_id: int = 0) -> None:
        """One of the two queues has grown. Prepared messages first: what ends now may have begun
        just now."""
        table = self.table
        for message in self.reader.prepared(table.half_next):
            transaction = self._add(message)
            if transaction.wants_check and transaction.copy_offset is None:
                transaction.wants_check = False
                record = self.reader.record(transaction.physical_offset)
                if record is not None and not transaction.is_ending:
                    self.check_back.ask(transaction, record)
        for offset, offsets in self.reader.ops(table.op_next):
            table.op(offset, offsets)
            for done in offsets:
                if (known := self._giving_up.pop(done, None)) is not None:
                    self._given_up(known)
        self.mark_superseded()

    def _add(self, message: Prepared) -> OpenTransaction:
        transaction, old_offset = self.table.add(message)
        if old_offset is not None:
            self._superseded.append(old_offset)
        is_own_copy = transaction.copy_offset == message.offset
        if is_own_copy:
            transaction.copy_offset = None
        if is_own_copy and not transaction.wants_check:
            due_ms = transaction.due_ms  # carried, not checked
        elif message.checks:
            due_ms = self._after(message.stored_ms, self.interval_ms)
        else:
            wait_ms = message.immunity_ms
            if wait_ms is None:
                wait_ms = self._settings.broker.transaction_timeout_ms
            due_ms = self._after(message.began_ms, wait_ms)
        self.table.plan(transaction, due_ms)
        return transaction

    def _after(self, stored_ms: int, wait_ms: int) -> int:
        """`wait_ms` after a store time, on the steady clock. A store time in the future was
        written before the wall clock was set back: then the wait begins now."""
        age_ms = max(self._clock.now_ms() - stored_ms, 0)
        return self._steady.now_ms() - age_ms + wait_ms

    def mark_superseded(self) -> None:
        """Ops for the messages that newer ones of their transactions have superseded."""
        offsets, self._superseded = self._superseded, []
        if not offsets:
            return
        try:
            for offset in offsets:
                self._append_op(offset)
        except StoreError as error:
            self._superseded += offsets
            log.warning("superseded half messages are marked later: %s", error)
            return
        self._group_commit.commit_internal(lambda: self._superseded.extend(offsets))

    # ------------------------------------------------------------------------------ how far it is

    @property
    def interval_ms(self) -> int:
        """Between two checks of a transaction."""
        return self._settings.broker.transaction_check_interval_ms

    def note_progress(self) -> None:
        """Hand on how far the queues are done, as far as that is safe."""
        half_low = self.table.half_low
        low = {HALF_TOPIC: half_low, OP_TOPIC: self.table.op_low(half_low)}
        has_moved = any(progress.value != low[name] for name, progress in self._progress.items())
        for topic, progress in self._progress.items():
            if has_moved:
                progress.advance(low[topic], self._store.written_offset)
            safe = progress.durable_value(self._store.synced_offset)
            if safe > max(self._offsets.committed(TRANSACTION_GROUP, topic, 0), 0):
                self._offsets.commit(TRANSACTION_GROUP, topic, 0, safe)

    # ------------------------------------------------------------------------ what time demands

    def run(self) -> None:
        """One slice."""
        if not self.is_on:
            return
        try:
            self.mark_superseded()
            work = TimeSlice(self._steady, SLICE_S, SLICE_TRANSACTIONS)
            while not work.is_over and (one := self.table.pop_due(work.now_ms)) is not None:
                # Whatever comes of it now: not again before the next time.
                self.table.plan(one, work.now_ms + self.interval_ms)
                if one.copy_offset is None:
                    self._check(one)
                work.count_done()
            self._carry()
            self._complaint = ""
        except StoreError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("transactions wait to be checked: %s", error)
        self.note_progress()

    def stop(self) -> None:
        """Ask nobody any more."""
        self.note_progress()
        self.is_on = False
        for topic in (HALF_TOPIC, OP_TOPIC):
            self._group_commit.topic_listeners.pop(topic, None)

    def _check(self, transaction: OpenTransaction) -> None:
        record = self.reader.record(transaction.physical_offset)
        if record is None:
            self.lost += 1
            log.error(
                "the half message of transaction %s is deleted, undecided: raise fileReservedTime",
                transaction.unique_id,
            )  # fmt: skip
            self.end(transaction, GIVEN_UP)
            return
        self.check_back.overdue(transaction, record)
        age_ms = self._clock.now_ms() - transaction.began_ms
        kept_ms = self._settings.store.file_reserved_hours * _HOUR_MS
        if transaction.checks >= self._settings.broker.transaction_check_max or age_ms > kept_ms:
            self._topics.ensure(CHECK_MAX_TOPIC, 1)
            self._intake.append(draft_of(record, CHECK_MAX_TOPIC, 0, properties_of(record)))
            self._giving_up[transaction.offset] = GivenUp(
                record.get_text(UNIQ_KEY),
                record.get_text(PRODUCER_GROUP),
                record.get_text(REAL_TOPIC),
                transaction.checks,
                age_ms,
            )
            self.end(transaction, GIVEN_UP)
        elif self.check_back.choose(record.get_text(PRODUCER_GROUP)) is not None:
            self.copy(transaction, record, transaction.checks + 1)

    def _given_up(self, known: GivenUp) -> None:
        self.given_up += 1
        log.error(
            "transaction %s of producer group %s for topic %s is given up after %d checks in "
            "%.0f s: its message is kept in %s",
            known.unique_id, known.group, known.topic, known.checks, known.age_ms / 1000,
            CHECK_MAX_TOPIC,
        )  # fmt: skip
        for listener in self.on_given_up:
            try:
                listener(known)
            except Exception:  # somebody else's code: the broker goes on
                log.exception("a hook for transactions that are given up failed")

    def _carry(self) -> None:
        table = self.table
        limit = table.half_next - max(WINDOW_MESSAGES, 4 * len(table))
        stragglers = takewhile(lambda transaction: transaction.offset < limit, table)
        for transaction in list(islice(stragglers, SLICE_TRANSACTIONS)):
            record = self.reader.record(transaction.physical_offset)
            if record is not None and transaction.copy_offset is None and not transaction.is_ending:
                self.copy(transaction, record, transaction.checks)
