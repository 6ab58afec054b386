"""Record the way of messages, and encode and decode the trace messages of RocketMQ's clients.

The body of a trace message is a sequence of records. Each ends with U+0002, its fields are
separated by U+0001 (spec/remoting.md §21). There are five kinds of records about a message:

    Pub             its producer has sent it                     SendTrace
    EndTransaction  its producer has ended its transaction       TransactionTrace
    Recall          its producer has recalled it                 RecallTrace
    SubBefore       a consumer has received it                   DeliveryTrace
    SubAfter        that consumer has processed it; same         ConsumeTrace
                    request id

None is written as "null", because Java's decoder loses empty fields at the end. "null" and an empty
field are read as None. Unknown and damaged records are counted, not raised: one faulty client must
not hide the records of the others.

`Tracing` collects the records of one client, and a writer sends them as messages:

    producer, consumer --hooks--> Tracing (bounded, in memory) --next_message--> writer --> topic

A hook appends a small tuple and wakes the writer. The writer does what takes time: it splits
properties and encodes records. Records beyond `COUNT_MAX` are dropped and counted, because tracing
must never slow down or fail the client. Nothing is recorded about the trace topic itself, or about
messages whose broker has set TRACE_ON=false (spec/remoting.md §9).

A trace message has at most `RECORDS_MAX` records, `BYTES_MAX` bytes and `KEY_CHARACTERS_MAX`
characters of KEYS. Brokers find it by their key index, so each message id in it must be one of its
keys. The Java client writes one record for a whole batch; this client writes one for each message
of it.
"""

import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from sluicemq.client.core.messages import OutgoingMessage
from sluicemq.client.core.requests import SendResult, header_fields
from sluicemq.clock import Clock
from sluicemq.errors import ConfigurationError, RouteNotFoundError
from sluicemq.model.message import (
    DELAY,
    KEYS,
    MSG_REGION,
    SHARDING_KEY,
    TAGS,
    TIMER_PROPERTIES,
    TRACE_ON,
    TRAN_MSG,
    Message,
    StoredMessage,
)
from sluicemq.model.system_names import TRACE_TOPIC
from sluicemq.record.codec import decode_batch, decode_properties
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")
FIELD_SEPARATOR: Final = "\x01"
RECORD_SEPARATOR: Final = "\x02"
_NULL: Final = "null"


class MessageKind(IntEnum):
    """The kind of a message that was sent."""

    NORMAL = 0
    HALF = 1
    COMMITTED = 2
    DELAYED = 3
    ORDERED = 4


class ConsumeOutcome(IntEnum):
    """How a handler ended."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURNED_NULL = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class SendTrace:
    """A message was sent. `time_ms` is when the send began, in milliseconds since 1970.

    Java writes one record for a whole batch: `message_id` and `offset_message_id` are then lists of
    ids, separated by commas. `cost_ms` is the duration of the send.
    """

    time_ms: int
    region: str | None
    group: str | None
    topic: str | None
    message_id: str | None
    tags: str | None
    keys: str | None
    store_host: str | None
    body_length: int
    cost_ms: int
    kind: MessageKind
    offset_message_id: str | None
    success: bool
    client_host: str | None = None


@dataclass(frozen=True, slots=True)
class DeliveryTrace:
    """A consumer received a message. `retry_times` is how often it had been delivered before."""

    time_ms: int
    region: str | None
    group: str | None
    request_id: str | None
    message_id: str | None
    retry_times: int
    keys: str | None


@dataclass(frozen=True, slots=True)
class ConsumeTrace:
    """A consumer processed a message. Clients of the cloud edition omit time and group."""

    request_id: str | None
    message_id: str | None
    cost_ms: int
    success: bool
    keys: str | None
    outcome: ConsumeOutcome
    time_ms: int | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class TransactionTrace:
    """A producer ended a transaction.

    `state` is COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW (RocketMQ's spelling). `from_check` says
    that it answered a transaction check.
    """

    time_ms: int
    region: str | None
    group: str | None
    topic: str | None
    message_id: str | None
    tags: str | None
    keys: str | None
    store_host: str | None
    kind: MessageKind
    transaction_id: str | None
    state: str | None
    from_check: bool


@dataclass(frozen=True, slots=True)
class RecallTrace:
    """A producer recalled a timed message, or tried to."""

    time_ms: int
    region: str | None
    group: str | None
    topic: str | None
    message_id: str | None
    success: bool


TraceRecord = SendTrace | DeliveryTrace | ConsumeTrace | TransactionTrace | RecallTrace


def encode_trace_records(records: Iterable[TraceRecord]) -> bytes:
    """Return the body of a trace message."""
    return "".join(map(encode_record, records)).encode()


def encode_record(record: TraceRecord) -> str:
    """Return one record as text, with its fields in the order of the format and its separator."""
    fields = [getattr(record, name) for name in _FIELD_PARSERS[type(record)]]
    if isinstance(record, SendTrace) and record.client_host is None:
        del fields[-1]
    if isinstance(record, ConsumeTrace) and record.time_ms is None:
        fields[-2:] = [""]
    return (
        FIELD_SEPARATOR.join(map(_encode_field, [_RECORD_NAMES[type(record)], *fields]))
        + RECORD_SEPARATOR
    )


def _encode_field(value: object) -> str:
    """Return a field as text.

    Separators in it are replaced by spaces, to keep the other fields intact.
    """
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    text = str(value)
    if FIELD_SEPARATOR in text or RECORD_SEPARATOR in text:  # it would shift all later fields
        text = text.replace(FIELD_SEPARATOR, " ").replace(RECORD_SEPARATOR, " ")
    return text


def decode_trace_records(body: bytes) -> tuple[list[TraceRecord], int]:
    """Return the records of a trace message, and how many more could not be decoded."""
    records: list[TraceRecord] = []
    unread = 0
    for line in body.decode("utf-8", "replace").split(RECORD_SEPARATOR):
        if not line:
            continue
        name, *fields = line.split(FIELD_SEPARATOR)
        try:
            kind = _RECORD_CLASSES[name]
            # Fields that older clients omit are filled in; fields that newer ones add are ignored.
            if kind is SendTrace and len(fields) == 12:  # before there was an offset message id
                fields.insert(11, _NULL)
            elif kind is DeliveryTrace:
                fields[5] = fields[5].removesuffix(_NULL) or "0"
                fields += [_NULL] if len(fields) == 6 else []
            elif kind is ConsumeTrace:
                if len(fields) == 5:
                    is_success = fields[3] == "true"
                    fields.append(
                        str(int(ConsumeOutcome.SUCCESS if is_success else ConsumeOutcome.FAILED))
                    )
                fields = fields[:8] if len(fields) >= 8 else fields[:6]
            texts = zip(_FIELD_PARSERS[kind].values(), fields, strict=False)
            records.append(kind(*(convert(text) for convert, text in texts)))
        except (KeyError, ValueError, IndexError, TypeError):
            unread += 1
    return records, unread


_RECORD_NAMES: Final[dict[type[TraceRecord], str]] = {
    SendTrace: "Pub",
    DeliveryTrace: "SubBefore",
    ConsumeTrace: "SubAfter",
    TransactionTrace: "EndTransaction",
    RecallTrace: "Recall",
}
_RECORD_CLASSES: Final = {name: kind for kind, name in _RECORD_NAMES.items()}
_PARSERS_BY_TYPE: Final[dict[object, Callable[[str], Any]]] = {
    int: int,
    int | None: int,
    str | None: lambda text: None if text in (_NULL, "") else text,
    bool: {"true": True, "false": False}.__getitem__,
    MessageKind: lambda text: MessageKind(int(text)),
    ConsumeOutcome: lambda text: ConsumeOutcome(int(text)),
}
_FIELD_PARSERS: Final = {
    kind: {one.name: _PARSERS_BY_TYPE[one.type] for one in dataclasses.fields(kind)}
    for kind in _RECORD_NAMES
}
"""Maps each kind of record to the parsers of its fields, in the order of the format."""


def search_keys(record: TraceRecord) -> Iterator[str]:
    """Yield the keys by which the trace message with this record can be found."""
    if record.message_id is not None:
        yield record.message_id
    keys = None if isinstance(record, RecallTrace) else record.keys
    if keys is not None:
        yield from keys.split()


INNER_GROUP: Final = "_INNER_TRACE_PRODUCER-sluicemq"
"""The producer group that sends trace messages."""
LINGER_S: Final = 1.0
"""How many seconds the writer waits for further records before it sends a message."""
COUNT_MAX: Final = 20_000
RECORDS_MAX: Final = 100
BYTES_MAX: Final = 128_000
KEY_CHARACTERS_MAX: Final = 6_000
_PREPARED_MAX: Final = 1_000
_DEFAULT_REGION: Final = "DefaultRegion"
_STATE_NAMES: Final = {8: "COMMIT_MESSAGE", 12: "ROLLBACK_MESSAGE", 0: "UNKNOW"}


def parse_trace_option(trace: bool | str | None) -> str | None:
    """Return the topic that the option `trace` of the clients means, None for no tracing.

    True means RocketMQ's trace topic; a string is the name of another topic. Raises
    ConfigurationError for any other value.
    """
    if isinstance(trace, str):
        if not trace:
            raise ConfigurationError(
                "trace is an empty string.", fix="Pass True or the name of a topic."
            )
        return trace
    if trace not in (True, False, None):
        raise ConfigurationError(
            f"trace must be a bool or a string, got {trace!r:.60}.",
            fix="Pass True or the name of a topic.",
        )
    return TRACE_TOPIC if trace else None


def trace_hint(error: Exception) -> str:
    """Return a hint for the log if `error` means that no broker has the trace topic, else ""."""
    if isinstance(error, RouteNotFoundError):
        return " (set traceTopicEnable=true on a broker, or create the topic)"
    return ""


class _SendNote(NamedTuple):
    """A send, as the hook noted it. The writer makes a `SendTrace` of it."""

    time_ms: int
    region: str
    group: str
    topic: str
    message_id: str
    properties: str
    address: str
    body_length: int
    cost_ms: int
    offset_message_id: str
    success: bool


class TraceMessage(NamedTuple):
    """A trace message to send, and the number of its records."""

    message: Message
    record_count: int


class Tracing:
    """The trace records of one client that are not written yet.

    Hooks may be called from any thread, because appending to a deque is atomic.
    """

    def __init__(
        self,
        topic: str,
        clock: Clock,
        next_id: Callable[[], str],
        *,
        count_max: int = COUNT_MAX,
    ) -> None:
        self.topic = topic
        self.clock = clock
        self.next_id = next_id
        self.dropped_count: int = 0
        """The number of records that were dropped."""
        self.has_warned = False
        """Whether a warning was logged that trace records cannot be written."""
        self.on_note: Callable[[], None] = lambda: None
        """Called after each new record. It must return at once."""
        self._count_max = count_max
        self._notes: deque[_SendNote | TraceRecord] = deque()
        self._prepared_labels: OrderedDict[str, tuple[str | None, str | None]] = OrderedDict()
        """Maps the message id of a prepared message to its tag and keys."""

    def __len__(self) -> int:
        return len(self._notes)

    def close(self) -> None:
        """Drop the records that are not written yet.

        Log a warning with the number of dropped records, if any were dropped.
        """
        self.count_dropped(len(self))
        if self.dropped_count:
            _log.warning("%d trace records were not written", self.dropped_count)

    def count_dropped(self, count: int) -> None:
        """Count `count` records that the writer could not write."""
        self.dropped_count += count

    def add_note(self, note: "_SendNote | TraceRecord") -> None:
        """Add a record, or drop and count it if the limit is reached."""
        if len(self._notes) >= self._count_max:
            self.dropped_count += 1
            return
        self._notes.append(note)
        self.on_note()

    # ------------------------------------------------------------------------- producers

    def record_send(
        self,
        group: str,
        outgoing: OutgoingMessage,
        results: Sequence[SendResult],
        address: str,
        response: Command,
        cost_s: float,
        *,
        batch: bool = False,
    ) -> None:
        """Record that the broker at `address` stored a message, or a batch of messages.

        `response` is the broker's response. The send took `cost_s` seconds.
        """
        fields = header_fields(response)
        if fields.get(TRACE_ON) != "false":
            ids = [(result.message_id, result.offset_message_id) for result in results]
            region = fields.get(MSG_REGION) or _DEFAULT_REGION
            self._add_send_notes(group, outgoing, ids, address, cost_s, region=region, batch=batch)

    def record_failed_send(
        self,
        group: str,
        outgoing: OutgoingMessage,
        ids: Sequence[str],
        cost_s: float,
        *,
        batch: bool,
    ) -> None:
        """Record that a send failed with all its attempts. `ids` are the message ids in it."""
        self._add_send_notes(group, outgoing, [(one, "") for one in ids], "", cost_s, batch=batch)

    def _add_send_notes(
        self,
        group: str,
        outgoing: OutgoingMessage,
        ids: Sequence[tuple[str, str]],
        address: str,
        cost_s: float,
        *,
        region: str = _DEFAULT_REGION,
        batch: bool,
    ) -> None:
        """Add a note for each message of a send.

        `ids` are pairs (message id, offset message id). An empty `address` means that the send
        failed.
        """
        if outgoing.topic == self.topic:
            return
        parts = [(outgoing.properties, len(outgoing.body))]
        if batch:
            parts = [
                (str(properties, "utf-8", "replace"), len(body))
                for _, body, properties, _ in decode_batch(outgoing.body)
            ]
        cost_ms = round(cost_s * 1000)
        time_ms = self.clock.now_ms() - cost_ms
        for (properties, length), (message_id, offset_message_id) in zip(parts, ids, strict=False):
            self.add_note(
                _SendNote(
                    time_ms=time_ms,
                    region=region,
                    group=group,
                    topic=outgoing.topic,
                    message_id=message_id,
                    properties=properties,
                    address=address,
                    body_length=length,
                    cost_ms=cost_ms,
                    offset_message_id=offset_message_id,
                    success=bool(address),
                )
            )

    def record_transaction_end(
        self,
        group: str,
        topic: str,
        transaction_id: str,
        state: int,
        address: str,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Record that a transaction was committed, rolled back or left undecided.

        `properties` are those of the message in a transaction check, None without a check.
        """
        known = properties or {}
        tags, keys = known.get(TAGS), known.get(KEYS)
        if properties is None:
            tags, keys = self._prepared_labels.pop(transaction_id, (None, None))
        self.add_note(
            TransactionTrace(
                time_ms=self.clock.now_ms(),
                region=known.get(MSG_REGION) or _DEFAULT_REGION,
                group=group,
                topic=topic,
                message_id=transaction_id,
                tags=tags,
                keys=keys,
                store_host=address,
                kind=MessageKind.COMMITTED,
                transaction_id=transaction_id,
                state=_STATE_NAMES[state],
                from_check=properties is not None,
            )
        )

    def record_recall(self, group: str, topic: str, message_id: str, *, success: bool) -> None:
        """Record that a timed message was recalled, or that recalling it failed."""
        self.add_note(
            RecallTrace(self.clock.now_ms(), _DEFAULT_REGION, group, topic, message_id, success)
        )

    # ------------------------------------------------------------------------- consumers

    def start_delivery(self, group: str, record: StoredMessage) -> "TracedDelivery | None":
        """Record that a message is handed to the application. Return None if that is not traced."""
        properties = record.properties
        if record.topic == self.topic or properties.get(TRACE_ON) == "false":
            return None
        start_record = DeliveryTrace(
            self.clock.now_ms(),
            properties.get(MSG_REGION) or _DEFAULT_REGION,
            group,
            self.next_id(),
            record.message_id,
            record.reconsume_times,
            properties.get(KEYS),
        )
        self.add_note(start_record)
        return TracedDelivery(self, start_record)

    # ---------------------------------------------------------------------------- writer

    def next_message(self) -> TraceMessage | None:
        """Return the next trace message, with as many records as fit, or None if there are none.

        The records are removed.
        """
        texts: list[str] = []
        size = characters = 0
        keys: dict[str, None] = {}
        while self._notes and len(texts) < RECORDS_MAX:
            record = self._make_record(self._notes[0])
            text = encode_record(record)
            new_keys = [key for key in search_keys(record) if key not in keys]
            size += len(text.encode())
            characters += sum(len(key) + 1 for key in new_keys)
            if texts and (size > BYTES_MAX or characters > KEY_CHARACTERS_MAX):
                break
            self._notes.popleft()
            texts.append(text)
            keys.update(dict.fromkeys(new_keys))
        if not texts:
            return None
        message = Message(self.topic, "".join(texts).encode(), keys=tuple(keys))
        return TraceMessage(message, len(texts))

    def _make_record(self, note: "_SendNote | TraceRecord") -> TraceRecord:
        """Return the record of a note. The labels of a prepared message are kept for its end."""
        if not isinstance(note, _SendNote):
            return note
        properties = decode_properties(note.properties.encode())
        kind = MessageKind.ORDERED if SHARDING_KEY in properties else MessageKind.NORMAL
        if TRAN_MSG in properties:
            kind = MessageKind.HALF
        elif DELAY in properties or any(name in properties for name in TIMER_PROPERTIES):
            kind = MessageKind.DELAYED
        tags, keys = properties.get(TAGS), properties.get(KEYS)
        if kind is MessageKind.HALF:
            self._prepared_labels[note.message_id] = (tags, keys)
            if len(self._prepared_labels) > _PREPARED_MAX:
                self._prepared_labels.popitem(last=False)
        return SendTrace(
            time_ms=note.time_ms,
            region=note.region,
            group=note.group,
            topic=note.topic,
            message_id=note.message_id,
            tags=tags,
            keys=keys,
            store_host=note.address or None,
            body_length=note.body_length,
            cost_ms=note.cost_ms,
            kind=kind,
            offset_message_id=note.offset_message_id or None,
            success=note.success,
        )


class TracedDelivery:
    """One delivery of a message to a handler."""

    __slots__ = ("_start_record", "_started_s", "_tracing")

    def __init__(self, tracing: Tracing, start_record: DeliveryTrace) -> None:
        self._tracing = tracing
        self._start_record = start_record
        self._started_s = tracing.clock.monotonic_s()

    def finish(self, outcome: ConsumeOutcome) -> None:
        """Record how the handler ended, or what the application reported."""
        clock, start_record = self._tracing.clock, self._start_record
        cost_ms = round((clock.monotonic_s() - self._started_s) * 1000)
        self._tracing.add_note(
            ConsumeTrace(
                request_id=start_record.request_id,
                message_id=start_record.message_id,
                cost_ms=cost_ms,
                success=outcome is ConsumeOutcome.SUCCESS,
                keys=start_record.keys,
                outcome=outcome,
                time_ms=clock.now_ms(),
                group=start_record.group,
            )
        )
