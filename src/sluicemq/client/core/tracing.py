"""Collect trace records about one client's messages, to be sent as RocketMQ's trace messages.

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

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

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
from sluicemq.model.trace_records import (
    ConsumeOutcome,
    ConsumeTrace,
    DeliveryTrace,
    MessageKind,
    RecallTrace,
    SendTrace,
    TraceRecord,
    TransactionTrace,
    encode_record,
    search_keys,
)
from sluicemq.record.codec import decode_batch, decode_properties
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")
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
    """Return the topic for traces that a client's option `trace` means, None for no tracing.

    True means RocketMQ's trace topic, a string another topic, and False or None no tracing. Raises
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
    """A send, as the hook noted it. The writer makes a `SendTrace` of it.

    `properties` is the encoded text. `address` and `offset_message_id` are "" for a failed send.
    `time_ms` is when the send began, in milliseconds since 1970.
    """

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
        """Create an empty collection of trace records, which will be sent to `topic`.

        `next_id()` returns a new id for a delivery. At most `count_max` records wait for being
        sent; further ones are dropped and counted.
        """
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

        If any record was dropped, now or before, a warning says how many.
        """
        self.count_dropped(len(self))
        if self.dropped_count:
            _log.warning("%d trace records were not written", self.dropped_count)

    def count_dropped(self, count: int) -> None:
        """Count `count` records that the writer could not write."""
        self.dropped_count += count

    def add_note(self, note: "_SendNote | TraceRecord") -> None:
        """Add a record and call `on_note`, or drop the record if the limit is reached.

        Dropped records are counted in `dropped_count`.
        """
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
        send_results: Sequence[SendResult],
        address: str,
        response: Command,
        cost_s: float,
        *,
        batch: bool = False,
    ) -> None:
        """Record that the broker at `address` has stored a message or, with `batch`, a batch.

        `cost_s` is how long the send took in seconds. `response` is the broker's response. If it
        says TRACE_ON=false, the broker wants no traces and nothing is recorded.
        """
        fields = header_fields(response)
        if fields.get(TRACE_ON) == "false":
            return
        ids = [(result.message_id, result.offset_message_id) for result in send_results]
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
        """Record that a send failed with all its attempts, which took `cost_s` seconds.

        `ids` are the message ids in it, several for a batch.
        """
        ids_without_offset = [(message_id, "") for message_id in ids]
        self._add_send_notes(group, outgoing, ids_without_offset, "", cost_s, batch=batch)

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
        """Add one record for each message of a send.

        `ids` are pairs (message id, offset message id), in the order of the messages. `address` is
        the broker; "" means that the send failed. A message of the trace topic itself is not
        recorded.
        """
        if outgoing.topic == self.topic:
            return
        cost_ms = round(cost_s * 1000)
        time_ms = self.clock.now_ms() - cost_ms
        messages = _list_properties_and_sizes(outgoing, batch=batch)
        for (properties, body_length), (message_id, offset_message_id) in zip(
            messages, ids, strict=False
        ):
            self.add_note(
                _SendNote(
                    time_ms=time_ms,
                    region=region,
                    group=group,
                    topic=outgoing.topic,
                    message_id=message_id,
                    properties=properties,
                    address=address,
                    body_length=body_length,
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

        `state` is a `TransactionState`, and `address` the broker's. `properties` are those of the
        message if a check by the broker caused the end. None means that this producer ended its own
        transaction; tag and keys then come from the record of the prepared message.
        """
        checked_properties = properties or {}
        tags = checked_properties.get(TAGS)
        keys = checked_properties.get(KEYS)
        if properties is None:
            tags, keys = self._prepared_labels.pop(transaction_id, (None, None))
        self.add_note(
            TransactionTrace(
                time_ms=self.clock.now_ms(),
                region=checked_properties.get(MSG_REGION) or _DEFAULT_REGION,
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

    def start_delivery(
        self, group: str, record: StoredMessage, retry_times: int
    ) -> "TracedDelivery | None":
        """Record that a message is handed to the application, and return the delivery.

        `retry_times` is how many times the group has failed to process the message.
        The caller calls `finish` of the result at the end. For a message of the trace topic, or if
        the broker has set TRACE_ON=false, nothing is recorded and the result is None.
        """
        properties = record.properties
        if record.topic == self.topic or properties.get(TRACE_ON) == "false":
            return None
        start_record = DeliveryTrace(
            self.clock.now_ms(),
            properties.get(MSG_REGION) or _DEFAULT_REGION,
            group,
            self.next_id(),
            record.message_id,
            retry_times,
            properties.get(KEYS),
        )
        self.add_note(start_record)
        return TracedDelivery(self, start_record)

    # ---------------------------------------------------------------------------- writer

    def next_message(self) -> TraceMessage | None:
        """Remove the oldest records and return a message for the trace topic that contains them.

        It has as many records as fit, at least one. Returns None if there are no records.
        """
        encoded_records: list[str] = []
        body_bytes = 0
        key_characters = 0
        keys: dict[str, None] = {}  # a dict keeps the order
        while self._notes and len(encoded_records) < RECORDS_MAX:
            record = self._make_record(self._notes[0])
            encoded_record = encode_record(record)
            new_keys = [key for key in search_keys(record) if key not in keys]
            body_bytes += len(encoded_record.encode())
            key_characters += sum(len(key) + 1 for key in new_keys)
            is_full = body_bytes > BYTES_MAX or key_characters > KEY_CHARACTERS_MAX
            if encoded_records and is_full:
                break
            self._notes.popleft()
            encoded_records.append(encoded_record)
            keys.update(dict.fromkeys(new_keys))

        if not encoded_records:
            return None
        body = "".join(encoded_records).encode()
        return TraceMessage(Message(self.topic, body, keys=tuple(keys)), len(encoded_records))

    def _make_record(self, note: "_SendNote | TraceRecord") -> TraceRecord:
        """Return the trace record to send for a note, which is a send in compact form or a record.

        Tag and keys of a prepared message are kept, because the record of its transaction's end
        needs them. At most `_PREPARED_MAX` are kept; the oldest are dropped.
        """
        if not isinstance(note, _SendNote):
            return note
        properties = decode_properties(note.properties.encode())
        message_kind = _find_message_kind(properties)
        tags = properties.get(TAGS)
        keys = properties.get(KEYS)
        if message_kind is MessageKind.HALF:
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
            kind=message_kind,
            offset_message_id=note.offset_message_id or None,
            success=note.success,
        )


def _list_properties_and_sizes(outgoing: OutgoingMessage, *, batch: bool) -> list[tuple[str, int]]:
    """Return (encoded properties, size of the body) of each message in a send request.

    With `batch`, the body of `outgoing` contains the messages. Otherwise `outgoing` is the only
    one.
    """
    if not batch:
        return [(outgoing.properties, len(outgoing.body))]
    return [
        (str(properties, "utf-8", "replace"), len(body))
        for _, body, properties, _ in decode_batch(outgoing.body)
    ]


def _find_message_kind(properties: Mapping[str, str]) -> MessageKind:
    """Return the kind of a message for its trace record, from its properties.

    HALF is a prepared message of a transaction; DELAYED, ORDERED and NORMAL are the others.
    """
    if TRAN_MSG in properties:
        return MessageKind.HALF
    if DELAY in properties or any(name in properties for name in TIMER_PROPERTIES):
        return MessageKind.DELAYED
    if SHARDING_KEY in properties:
        return MessageKind.ORDERED
    return MessageKind.NORMAL


class TracedDelivery:
    """One traced delivery of a message to a handler. It begins when the object is created."""

    __slots__ = ("_start_record", "_started_s", "_tracing")

    def __init__(self, tracing: Tracing, start_record: DeliveryTrace) -> None:
        self._tracing = tracing
        self._start_record = start_record
        self._started_s = tracing.clock.monotonic_s()

    def finish(self, outcome: ConsumeOutcome) -> None:
        """Record the outcome of processing the message, and how long it took."""
        clock = self._tracing.clock
        start_record = self._start_record
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
