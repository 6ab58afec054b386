"""The body of trace messages: what happened to messages, as RocketMQ's clients tell it.

A body is records, each ended by U+0002, of fields that are separated by U+0001 (spec/remoting.md
§21). A message's way leaves up to five kinds of them:

    Pub             its producer has sent it                     Published
    EndTransaction  its producer has ended it                    Ended
    Recall          its producer has taken it back               Recalled
    SubBefore       a consumer was given it                      Taken
    SubAfter        that consumer has finished; same request id  Finished

Nothing is written "null", so is empty text: Java's decoder loses empty fields at the end. Records
that are unknown or damaged are counted, not raised: one strange client must not hide the others.

What a client notes while it works, and the trace messages that are made of it.

    producer, consumer --hooks--> Tracing (bounded, in memory) --take--> writer --> topic

A hook appends a small tuple and wakes the writer; everything that costs (splitting properties,
text) is done by the writer. What exceeds `COUNT_MAX` is dropped and counted: a trace that cannot be
written must not slow or fail what it tells of. Nothing is noted about the trace topic itself, nor
when the broker has said TRACE_ON=false (spec/remoting.md §9).

Records become messages of at most 100 records, 128,000 bytes and `KEY_CHARACTERS_MAX` of KEYS: what
is looked for is found by a broker's key index, so every id must be a key of its own. (The Java
client writes one record for a batch; here each message of it has one.)
"""

import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from sluicemq.client.core.messages import Outgoing
from sluicemq.client.core.requests import SendResult, fields_of
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
FIELD: Final = "\x01"
RECORD: Final = "\x02"
_NULL: Final = "null"


class MessageKind(IntEnum):
    """What kind of message was sent."""

    NORMAL = 0
    HALF = 1
    COMMITTED = 2
    DELAYED = 3
    ORDERED = 4


class Outcome(IntEnum):
    """How a handler came back."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURNED_NULL = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class Published:
    """A send. `time_ms` is when it began. Java writes one for a whole batch: then `message_id` and
    `offset_message_id` are lists with commas."""

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
class Taken:
    """A delivery begins; `retry_times` says how often the message had come before."""

    time_ms: int
    region: str | None
    group: str | None
    request_id: str | None
    message_id: str | None
    retry_times: int
    keys: str | None


@dataclass(frozen=True, slots=True)
class Finished:
    """A delivery ends. Clients of the cloud's flavour leave time and group out."""

    request_id: str | None
    message_id: str | None
    cost_ms: int
    success: bool
    keys: str | None
    outcome: Outcome
    time_ms: int | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A producer has ended a transaction; `state` COMMIT_MESSAGE, ROLLBACK_MESSAGE or
    UNKNOW (spelt so), `from_check`: because the broker had asked."""

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
class Recalled:
    """A timed message was taken back."""

    time_ms: int
    region: str | None
    group: str | None
    topic: str | None
    message_id: str | None
    success: bool


TraceRecord = Published | Taken | Finished | Ended | Recalled


def encode(records: Iterable[TraceRecord]) -> bytes:
    """The body of a trace message."""
    return "".join(map(encode_record, records)).encode()


def encode_record(record: TraceRecord) -> str:
    """One record with its end: its fields in their order."""
    fields = [getattr(record, name) for name in _CONVERTERS[type(record)]]
    if isinstance(record, Published) and record.client_host is None:
        del fields[-1]
    if isinstance(record, Finished) and record.time_ms is None:
        fields[-2:] = [""]
    return FIELD.join(map(_text, [_NAMES[type(record)], *fields])) + RECORD


def _text(value: object) -> str:
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    text = str(value)
    if FIELD in text or RECORD in text:  # would shift every field after it
        text = text.replace(FIELD, " ").replace(RECORD, " ")
    return text


def decode(body: bytes) -> tuple[list[TraceRecord], int]:
    """The records of a trace message, and how many more could not be understood."""
    records: list[TraceRecord] = []
    unread = 0
    for line in body.decode("utf-8", "replace").split(RECORD):
        if not line:
            continue
        name, *fields = line.split(FIELD)
        try:
            kind = _KINDS[name]
            # What older clients leave out is put in its place; what newer ones add is not read.
            if kind is Published and len(fields) == 12:  # before there was an offset message id
                fields.insert(11, _NULL)
            elif kind is Taken:
                fields[5] = fields[5].removesuffix(_NULL) or "0"
                fields += [_NULL] if len(fields) == 6 else []
            elif kind is Finished:
                if len(fields) == 5:
                    is_success = fields[3] == "true"
                    fields.append(str(int(Outcome.SUCCESS if is_success else Outcome.FAILED)))
                fields = fields[:8] if len(fields) >= 8 else fields[:6]
            texts = zip(_CONVERTERS[kind].values(), fields, strict=False)
            records.append(kind(*(convert(text) for convert, text in texts)))
        except (KeyError, ValueError, IndexError, TypeError):
            unread += 1
    return records, unread


_NAMES: Final[dict[type[TraceRecord], str]] = {
    Published: "Pub",
    Taken: "SubBefore",
    Finished: "SubAfter",
    Ended: "EndTransaction",
    Recalled: "Recall",
}
_KINDS: Final = {name: kind for kind, name in _NAMES.items()}
_OF_TYPE: Final[dict[object, Callable[[str], Any]]] = {
    int: int,
    int | None: int,
    str | None: lambda text: None if text in (_NULL, "") else text,
    bool: {"true": True, "false": False}.__getitem__,
    MessageKind: lambda text: MessageKind(int(text)),
    Outcome: lambda text: Outcome(int(text)),
}
_CONVERTERS: Final = {
    kind: {one.name: _OF_TYPE[one.type] for one in dataclasses.fields(kind)} for kind in _NAMES
}
"""How the fields of each kind are read, in their order."""


def search_words(record: TraceRecord) -> Iterator[str]:
    """What a trace message with this record is found by: its KEYS."""
    if record.message_id is not None:
        yield record.message_id
    keys = None if isinstance(record, Recalled) else record.keys
    if keys is not None:
        yield from keys.split()


INNER_GROUP: Final = "_INNER_TRACE_PRODUCER-sluicemq"
LINGER_S: Final = 1.0
COUNT_MAX: Final = 20_000
RECORDS_MAX: Final = 100
BYTES_MAX: Final = 128_000
KEY_CHARACTERS_MAX: Final = 6_000
_HALVES_MAX: Final = 1_000
_REGION: Final = "DefaultRegion"
_STATES: Final = {8: "COMMIT_MESSAGE", 12: "ROLLBACK_MESSAGE", 0: "UNKNOW"}


def trace_topic(trace: bool | str | None) -> str | None:
    """The argument `trace=` of the clients: True is RocketMQ's own topic, text a topic of yours."""
    if isinstance(trace, str):
        if not trace:
            raise ConfigurationError("trace is an empty text.", fix="Give True, or a topic.")
        return trace
    if trace not in (True, False, None):
        raise ConfigurationError(f"trace is {trace!r:.60}.", fix="Give True, or a topic.")
    return TRACE_TOPIC if trace else None


def trace_hint(error: Exception) -> str:
    """What to do when no broker has the trace topic."""
    if isinstance(error, RouteNotFoundError):
        return " (set traceTopicEnable=true on a broker, or create the topic)"
    return ""


class _Sent(NamedTuple):
    """A send, as the hook saw it."""

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
    """A message to send, and how many records it tells."""

    message: Message
    record_count: int


class Tracing:
    """The notes of one client. Hooks may be called by any thread (appending is atomic)."""

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
        self.dropped: int = 0
        self.has_warned = False
        """Whether the log says already that they cannot be written."""
        self.on_work: Callable[[], None] = lambda: None
        """Called after each note; has to return at once."""
        self._count_max = count_max
        self._notes: deque[_Sent | TraceRecord] = deque()
        self._halves: OrderedDict[str, tuple[str | None, str | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def end(self) -> None:
        """What is not written by now is lost, and the log says how much that is."""
        self.lost(len(self))
        if self.dropped:
            _log.warning("%d trace records were not written", self.dropped)

    def lost(self, count: int) -> None:
        """Records that the writer could not write."""
        self.dropped += count

    def note(self, note: "_Sent | TraceRecord") -> None:
        """Keeps one, when there is room."""
        if len(self._notes) >= self._count_max:
            self.dropped += 1
            return
        self._notes.append(note)
        self.on_work()

    # ------------------------------------------------------------------------- producers

    def sent(
        self,
        group: str,
        outgoing: Outgoing,
        results: Sequence[SendResult],
        address: str,
        answer: Command,
        cost_s: float,
        *,
        batch: bool = False,
    ) -> None:
        """A broker has stored a message, or a batch."""
        fields = fields_of(answer)
        if fields.get(TRACE_ON) != "false":
            ids = [(result.message_id, result.offset_message_id) for result in results]
            region = fields.get(MSG_REGION) or _REGION
            self._note_sends(group, outgoing, ids, address, cost_s, region=region, batch=batch)

    def failed(
        self, group: str, outgoing: Outgoing, ids: Sequence[str], cost_s: float, *, batch: bool
    ) -> None:
        """A send was given up."""
        self._note_sends(group, outgoing, [(one, "") for one in ids], "", cost_s, batch=batch)

    def _note_sends(
        self,
        group: str,
        outgoing: Outgoing,
        ids: Sequence[tuple[str, str]],
        address: str,
        cost_s: float,
        *,
        region: str = _REGION,
        batch: bool,
    ) -> None:
        """Each message of a request, with its id and its place; without a place it failed."""
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
        for (properties, length), (message_id, place) in zip(parts, ids, strict=False):
            self.note(
                _Sent(
                    time_ms, region, group, outgoing.topic, message_id, properties, address,
                    length, cost_ms, place, bool(address),
                )
            )  # fmt: skip

    def ended(
        self,
        group: str,
        topic: str,
        transaction_id: str,
        state: int,
        address: str,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """A transaction was committed, rolled back or left undecided; `properties`: those of the
        message that the broker asked about."""
        known = properties or {}
        tags, keys = known.get(TAGS), known.get(KEYS)
        if properties is None:
            tags, keys = self._halves.pop(transaction_id, (None, None))
        self.note(
            Ended(
                self.clock.now_ms(), known.get(MSG_REGION) or _REGION, group, topic,
                transaction_id, tags, keys, address, MessageKind.COMMITTED, transaction_id,
                _STATES[state], properties is not None,
            )
        )  # fmt: skip

    def recalled(self, group: str, topic: str, message_id: str, *, success: bool) -> None:
        """A timed message was taken back, or was not."""
        self.note(Recalled(self.clock.now_ms(), _REGION, group, topic, message_id, success))

    # ------------------------------------------------------------------------- consumers

    def taken(self, group: str, record: StoredMessage) -> "Delivery | None":
        """A message is handed to the application; None when that is not traced."""
        properties = record.properties
        if record.topic == self.topic or properties.get(TRACE_ON) == "false":
            return None
        taken = Taken(
            self.clock.now_ms(), properties.get(MSG_REGION) or _REGION, group, self.next_id(),
            record.message_id, record.reconsume_times, properties.get(KEYS),
        )  # fmt: skip
        self.note(taken)
        return Delivery(self, taken)

    # ---------------------------------------------------------------------------- writer

    def take(self) -> TraceMessage | None:
        """The next trace message, None when there is nothing to tell."""
        texts: list[str] = []
        size = characters = 0
        keys: dict[str, None] = {}
        while self._notes and len(texts) < RECORDS_MAX:
            record = self._record(self._notes[0])
            text = encode_record(record)
            own = [word for word in search_words(record) if word not in keys]
            size += len(text.encode())
            characters += sum(len(word) + 1 for word in own)
            if texts and (size > BYTES_MAX or characters > KEY_CHARACTERS_MAX):
                break
            self._notes.popleft()
            texts.append(text)
            keys.update(dict.fromkeys(own))
        if not texts:
            return None
        message = Message(self.topic, "".join(texts).encode(), keys=tuple(keys))
        return TraceMessage(message, len(texts))

    def _record(self, note: "_Sent | TraceRecord") -> TraceRecord:
        if not isinstance(note, _Sent):
            return note
        properties = decode_properties(note.properties.encode())
        kind = MessageKind.ORDERED if SHARDING_KEY in properties else MessageKind.NORMAL
        if TRAN_MSG in properties:
            kind = MessageKind.HALF
        elif DELAY in properties or any(name in properties for name in TIMER_PROPERTIES):
            kind = MessageKind.DELAYED
        tags, keys = properties.get(TAGS), properties.get(KEYS)
        if kind is MessageKind.HALF:
            self._halves[note.message_id] = (tags, keys)
            if len(self._halves) > _HALVES_MAX:
                self._halves.popitem(last=False)
        return Published(
            note.time_ms, note.region, note.group, note.topic, note.message_id, tags, keys,
            note.address or None, note.body_length, note.cost_ms, kind,
            note.offset_message_id or None, note.success,
        )  # fmt: skip


class Delivery:
    """One message in the hands of one handler."""

    __slots__ = ("_began_s", "_taken", "_tracing")

    def __init__(self, tracing: Tracing, taken: Taken) -> None:
        self._tracing = tracing
        self._taken = taken
        self._began_s = tracing.clock.monotonic_s()

    def finished(self, outcome: Outcome) -> None:
        """The handler came back, or the application has said what it did."""
        clock, taken = self._tracing.clock, self._taken
        cost_ms = round((clock.monotonic_s() - self._began_s) * 1000)
        self._tracing.note(
            Finished(
                taken.request_id, taken.message_id, cost_ms, outcome is Outcome.SUCCESS,
                taken.keys, outcome, clock.now_ms(), taken.group,
            )
        )  # fmt: skip
