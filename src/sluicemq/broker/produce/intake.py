"""How messages that are no plain sends enter the store, and how stored ones are read again.

    a send that is not plain, a message sent back, the commit of a transaction, a delayed message
    whose time has come   ->   Draft   ->   rewrites, in order   ->   Store.append

A rewrite looks at a draft and leaves it alone, changes where it goes (a prepared message, a delayed
one), or refuses it. Plain sends do without all this: `send.Send.send_quick`.

What the broker stores on its own has no request whose answer ends a turn: `put` asks for the end.
Such a message is visible, and safe, by the same rules as any other; whoever keeps an offset of what
is put must not persist it before `Store.synced_offset` has passed the message's end.

A large batch (320) of plain messages goes through as columns (`record.batch_columns`), without an
object for each; any other, and one that cannot be, is taken apart message by message, which says
what is wrong with it. tests/unit/broker/test_send_batch.py holds the two equal.

Stored messages are put where they belong (`Redelivery`): delayed ones when they are due, the
messages of transactions when they are committed. The record says everything: body, flags, times,
hosts and properties are taken from it as they lie, only topic, queue and tag code are found out.
The properties stay as they are, DELAY, REAL_TOPIC and REAL_QID included, as in RocketMQ
(spec/delivery.md §1, §2). No dict for a message that is due; a hundred thousand may be in one
second.
"""

import logging
import struct
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.broker.group_commit import GroupCommit
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topic
from sluicemq.clock import STEP_MS
from sluicemq.errors import MessageIllegalError, ProtocolError, RequestError, StoreFullError
from sluicemq.model.bodies import Buffer
from sluicemq.model.ids import HOST_BYTES_IPV4, offset_message_ids, tag_code
from sluicemq.model.message import (
    BORN_HOST_IPV6,
    STORE_HOST_IPV6,
    TAGS,
    TRAN_MSG,
    UNIQ_KEY,
)
from sluicemq.model.properties import ACTED_ON_SEND, REFUSED_IN_BATCH, remove_on_send
from sluicemq.model.system_names import STAGING_TOPIC, is_send_forbidden_topic
from sluicemq.model.topic import RETRY_PREFIX, RETRY_TOPIC_LENGTH_MAX
from sluicemq.numbers import natural
from sluicemq.record import codec as text
from sluicemq.record.codec import decode_batch, parse_head
from sluicemq.record.layout import MAGIC_V1, PROPERTIES_BYTES_MAX, RECORD_HEAD
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.store.writer import BatchPart
from sluicemq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from sluicemq.record import batch_columns
    from sluicemq.record.batch_columns import Spans

log = logging.getLogger(__name__)

ILLEGAL: Final = (
    "the message is illegal, maybe msg body or properties length not matched. "
    "msg body length limit {}B, msg properties length limit 32KB."
)
_CARE: Final = tuple(f"{name}\x01".encode() for name in sorted(ACTED_ON_SEND))
"""What the properties of a message in a batch are searched for; a longer name that ends alike is
looked at more closely, too."""
COLUMNS_BYTES_MIN: Final = 4096
"""A smaller batch has too few messages for columns."""
APART_MIN: Final = 1000
"""The largest number of messages of a batch that is decoded message by message in one step."""
NOWHERE: Final = -1
FLAGS_MAX: Final = 0x3
"""Compressed, or with several tags; other flags need care."""
TIME_MAX: Final = 1 << 62
REAL_TOPIC: Final = b"REAL_TOPIC"
REAL_QUEUE: Final = b"REAL_QID"
_IPV6: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_CHUNK_UNITS: Final = 256
_unpack_head: Final = RECORD_HEAD.struct.unpack_from
_HEAD_BYTES: Final = RECORD_HEAD.size


def code_of(error: Exception) -> int:
    """The code of an answer that says why a message was not stored."""
    if isinstance(error, RequestError):
        return error.code
    if isinstance(error, MessageIllegalError):
        return ResponseCode.MESSAGE_ILLEGAL
    is_full = isinstance(error, StoreFullError)
    return ResponseCode.SERVICE_NOT_AVAILABLE if is_full else ResponseCode.SYSTEM_ERROR


@dataclass(slots=True)
class Draft:
    """A message on its way into the store. Hosts are encoded (`model.ids.encode_host`).

    With `delay_ms` the queue's unit says when the message is due, `delay_ms` after its store time,
    instead of the hash of its tag. It is due `delay_ms` after `waits_from_ms` if that differs from
    the store time by a second or more, because the wall clock was set back. `answer_fields` are
    added to the answer of a send.
    """

    topic: str
    queue_id: int
    body: bytes | memoryview
    properties: dict[str, str]
    born_time_ms: int
    born_host: bytes
    store_host: bytes
    flag: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    prepared_offset: int = 0
    delay_ms: int | None = None
    waits_from_ms: int = 0
    answer_fields: dict[str, str] = field(default_factory=dict)


class Stored(NamedTuple):
    """Where a draft went, and the size of its encoded properties."""

    physical_offset: int
    queue_offset: int
    properties_bytes: int


Rewrite = Callable[[Draft], None]
"""Raises RequestError."""
OnStaged = Callable[[int, int, "Sequence[bytes] | Spans", "Sequence[Buffer] | Spans"], None]


class Origin(NamedTuple):
    """What all messages of a batch have in common; the hosts are encoded."""

    sys_flag: int
    born_time_ms: int
    born_host: bytes
    store_host: bytes

    @property
    def is_plain(self) -> bool:
        """Nothing that columns do not know, or that does not fit its field."""
        return (
            0 <= self.sys_flag <= FLAGS_MAX
            and 0 <= self.born_time_ms < TIME_MAX
            and len(self.born_host) == len(self.store_host) == HOST_BYTES_IPV4
        )


class Elsewhere:
    """Messages that a slave, standing in for this broker, has stored on another master
    (`replicas/acting.py`): each is passed over once when its time comes here too."""

    def __init__(self) -> None:
        self.left: Counter[tuple[str, str]] = Counter()
        """By topic and message id."""

    def took(self, topic: str, unique_id: str) -> bool:
        """Whether this one is there."""
        if not self.left[topic, unique_id]:
            return False
        self.left[topic, unique_id] -= 1
        return True


class Intake:
    """The one way into the store for everything that is not a plain send."""

    def __init__(self, settings: Settings, store: Store, group_commit: GroupCommit) -> None:
        self._settings = settings
        self._writer = store.writer
        self._group_commit = group_commit
        self.rewrites: list[Rewrite] = []
        self.sizes = [0] * 64
        """Messages by the number of bits of (body size - 1)."""
        self.on_staged: OnStaged = lambda *_: None
        """Told of each batch for the staging topic: queue, offset, stored properties, bodies."""
        self.elsewhere = Elsewhere()

    def receive(self, draft: Draft) -> Stored:
        """Accept a message that comes from outside: take off the properties that no sender may
        write (`model.properties`), then `accept` it.

        Raises RequestError, MessageIllegalError, StoreError.
        """
        remove_on_send(draft.properties, is_retry=draft.topic.startswith(RETRY_PREFIX))
        return self.accept(draft)

    def accept(self, draft: Draft) -> Stored:
        """Rewrite and append; the caller's answer ends the turn.

        Raises RequestError, MessageIllegalError, StoreError.
        """
        for rewrite in self.rewrites:
            rewrite(draft)
        return self.append(draft)

    def put(self, draft: Draft) -> Stored:
        """`accept` for what the broker stores on its own: the turn is ended as well."""
        stored = self.accept(draft)
        self._group_commit.commit_internal()
        return stored

    def append(self, draft: Draft) -> Stored:
        """As it is. Raises RequestError, MessageIllegalError, StoreError."""
        stored = text.as_text(draft.properties).encode("utf-8", "replace")
        self.check_properties(len(stored))
        physical_offset, queue_offset = self._writer.append(
            draft.topic, draft.queue_id, draft.body, stored,
            tag_code(draft.properties.get(TAGS, "")), draft.flag, draft.sys_flag,
            draft.born_time_ms, draft.born_host, draft.store_host, draft.reconsume_times,
            draft.prepared_offset,
        )  # fmt: skip
        if draft.delay_ms is not None:
            delay_ms, lead_ms = draft.delay_ms, draft.waits_from_ms - self._writer.now_ms
            if draft.waits_from_ms and abs(lead_ms) >= STEP_MS:
                delay_ms += lead_ms
            self._writer.delay_last_message(draft.topic, draft.queue_id, delay_ms)
        return Stored(physical_offset, queue_offset, len(stored))

    def check_properties(self, size: int) -> None:
        """Raises RequestError when encoded properties are larger than a record may hold."""
        limit = self._settings.broker.properties_length_max
        if size > limit:
            body_limit = self._settings.store.message_bytes_max
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"{ILLEGAL.format(body_limit)} The properties have {size} bytes, the limit is "
                f"{limit}. Put large values into the body.",
            )

    # -------------------------------------------------------------------------------- batches

    def prepare_batch(
        self, body: Buffer, origin: Origin, suffix: str
    ) -> "Generator[None, None, batch_columns.Columns | list[BatchPart]]":
        """Decode a batch and add the broker's own properties (`suffix`, encoded) to those of each
        message. Return what `append_batch` takes. A large batch whose messages are not alike takes
        several steps.

        Raises RequestError, MessageIllegalError.
        """
        limit = self._settings.store.message_bytes_max
        if len(body) > limit:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"{ILLEGAL.format(limit)} The batch has {len(body)} bytes.",
            )
        try:
            if (
                self._writer.can_append_columns
                and len(body) >= COLUMNS_BYTES_MIN
                and origin.is_plain
            ):
                columns = yield from self._columns_of(bytes(body), suffix.encode())
                if columns is not None:
                    return columns
            sent = decode_batch(body)
        except ProtocolError as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        if not sent:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, "The batch has no messages.")
        parts = _as_stored(sent, suffix.encode())
        self.check_properties(max(len(stored) for _, _, stored, _ in parts))
        return parts

    def _columns_of(
        self, body: bytes, suffix: bytes
    ) -> "Generator[None, None, batch_columns.Columns | None]":
        """Return the columns of a batch; None for a small one whose messages are not alike. HOT."""
        from sluicemq.record import batch_columns  # noqa: PLC0415 - NumPy for large batches only

        properties_max = self._settings.broker.properties_length_max
        columns = batch_columns.split(body, suffix, text.tag_code_of_value)
        if columns is not None and int(columns.property_sizes.max()) <= properties_max:
            return columns
        if not batch_columns.has_more(body, APART_MIN):
            return None
        added = text.as_dict(suffix.decode())

        def stored_of(own: bytes) -> bytes:
            stored = _one_as_stored(own, added, suffix)
            self.check_properties(len(stored))
            if b"\0" in stored:
                self._writer.check_sizes(0, stored)
            return stored

        return (yield from batch_columns.take_apart(body, stored_of, text.tag_code_of))

    def append_batch(
        self, topic: Topic, queue_id: int, batch: "batch_columns.Columns | list[BatchPart]",
        origin: Origin, id_prefix: str, *, is_brief: bool = False,
    ) -> tuple[str, int]:  # fmt: skip
        """Append all messages of a prepared batch or none. Return their ids, or only the first
        one's, and the first queue offset. HOT.

        Raises MessageIllegalError, StoreError.
        """
        ids_max = 1 if is_brief else None
        if isinstance(batch, list):
            positions, offset = self._writer.append_batch(topic.name, queue_id, batch, *origin)
            properties = [stored for _, _, stored, _ in batch]
            bodies = [body for _, body, _, _ in batch]
            self._count(topic, Counter(map(len, bodies)), sum(map(len, properties)))
            if topic.name == STAGING_TOPIC:
                self.on_staged(queue_id, offset, properties, bodies)
            wanted = positions[:ids_max]
            return offset_message_ids(id_prefix, struct.pack(f">{len(wanted)}q", *wanted)), offset
        heads = batch.heads
        heads["sys_flag"], heads["born_time"] = origin.sys_flag, origin.born_time_ms
        heads["born_host"], heads["store_host"] = origin.born_host, origin.store_host
        places, offset = self._writer.append_columns(topic.name, queue_id, batch)
        self._count(topic, batch.body_sizes(), int(batch.property_sizes.sum()))
        if topic.name == STAGING_TOPIC:
            self.on_staged(queue_id, offset, batch.properties, batch.bodies)
        return offset_message_ids(id_prefix, places[:ids_max].astype(">i8").tobytes()), offset

    def _count(self, topic: Topic, sizes: Mapping[int, int], properties_bytes: int) -> None:
        """`sizes`: how many bodies have which size."""
        for size, count in sizes.items():
            self.sizes[(size - 1).bit_length()] += count
            topic.messages_in += count
            topic.bytes_in += count * (size + topic.record_bytes)
        topic.bytes_in += properties_bytes


def _as_stored(sent: Sequence[BatchPart], suffix: bytes) -> list[BatchPart]:
    """Return the messages of a batch with the properties that are stored: those of each as if it
    had been sent alone (`model.properties`), then the broker's own (`suffix`).

    Raises RequestError for what no message of a batch can be.
    """
    joined = b"\x02".join([own for _, _, own, _ in sent])
    if any(name in joined for name in _CARE):
        added = text.as_dict(suffix.decode())
        return [
            (flag, body, _one_as_stored(own, added, suffix), tag) for flag, body, own, tag in sent
        ]
    return [(flag, body, _ended(own) + suffix, tag) for flag, body, own, tag in sent]


def _one_as_stored(own: bytes, added: Mapping[str, str], suffix: bytes) -> bytes:
    """`_as_stored` for the properties of one message; `added`: `suffix`, decoded."""
    if any(name in own for name in _CARE):
        return _with_care(own, added, suffix)
    return _ended(own) + suffix


def _with_care(own: bytes, added: Mapping[str, str], suffix: bytes) -> bytes:
    properties = text.as_dict(own.decode("utf-8", "replace"))
    if ACTED_ON_SEND.isdisjoint(properties):
        return _ended(own) + suffix
    refuse_in_batch(properties)
    remove_on_send(properties)
    for name, value in added.items():
        properties.setdefault(name, value)
    return text.as_text(properties).encode("utf-8", "replace")


def _ended(properties: bytes) -> bytes:
    """Encoded properties that others can follow."""
    return properties if properties[-1:] in (b"", b"\x02") else properties + b"\x02"


def refuse_in_batch(properties: dict[str, str]) -> None:
    """Raises RequestError for what no message of a batch can be (spec/store.md §2.5)."""
    if properties.get(TRAN_MSG, "").lower() == "true":
        raise RequestError(
            ResponseCode.MESSAGE_ILLEGAL,
            "a batch cannot be part of a transaction (property TRAN_MSG=true). The batch was not "
            "stored. Send messages of transactions one by one.",
        )
    for name in REFUSED_IN_BATCH.intersection(properties) - {TRAN_MSG}:
        if properties[name] != "0":
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a message of a batch cannot be delayed (property {name}={properties[name]}). "
                "The batch was not stored. Send delayed messages one by one.",
            )


class Record(NamedTuple):
    """What a stored record says; `topic_view` and `body` are slices of the mapped log."""

    size_bytes: int
    body_crc: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_time_ms: int
    born_host: bytes
    store_time_ms: int
    store_host: bytes
    reconsume_times: int
    topic_view: memoryview
    body: memoryview
    properties: bytes

    @property
    def topic(self) -> str:
        return str(self.topic_view, "utf-8", "replace")

    def text(self, name: str) -> str:
        """The value of a property, "" without it."""
        return (text.value_of(self.properties, name.encode()) or b"").decode("utf-8", "replace")

    def number(self, name: str) -> int | None:
        """The value of a property if that is a number."""
        value = text.value_of(self.properties, name.encode())
        return int(value) if value is not None and value.isdigit() and len(value) < 19 else None

    def all_properties(self) -> dict[str, str]:
        return text.as_dict(self.properties.decode("utf-8", "replace"))

    def draft(self, topic: str, queue_id: int, properties: dict[str, str]) -> Draft:
        """The same message for another place."""
        return Draft(
            topic, queue_id, self.body, properties, self.born_time_ms, self.born_host,
            self.store_host, self.flag, self.sys_flag, self.reconsume_times,
        )  # fmt: skip


def read_record(view: memoryview | None) -> Record | None:
    """The record that `view` holds; None when it is none. HOT."""
    if view is None:
        return None
    try:
        (
            size, magic, crc, _, flag, offset, position, sys_flag, born_ms, born_host, store_ms,
            store_host, reconsumed, _, body_bytes,
        ) = _unpack_head(view)  # fmt: skip
        if magic == MAGIC_V1 and not sys_flag & _IPV6:
            body_end = _HEAD_BYTES + body_bytes
            topic_end = body_end + 1 + view[body_end]
            return Record(
                size, crc, flag, offset, position, sys_flag, born_ms, born_host, store_ms,
                store_host, reconsumed, view[body_end + 1 : topic_end],
                view[_HEAD_BYTES:body_end], bytes(view[topic_end + 2 : size]),
            )  # fmt: skip
        head = parse_head(view)
    except (ProtocolError, IndexError, ValueError):
        return None
    return Record(
        head.size_bytes, head.body_crc, head.flag, head.queue_offset, head.physical_offset,
        head.sys_flag, head.born_time_ms, bytes(view[head.born_host]), head.store_time_ms,
        bytes(view[head.store_host]), head.reconsume_times,
        view[head.topic], view[head.body], bytes(view[head.properties]),
    )  # fmt: skip


class Entry(NamedTuple):
    """A unit of a queue and its record; None when it has none, or that is deleted."""

    offset: int
    position: int
    code: int
    record: Record | None


def entries(
    store: Store,
    topic: str,
    queue_id: int,
    offset: int,
    units: Callable[[str, int, int, int], Buffer] | None = None,
) -> Iterator[Entry]:
    """A queue from an offset on, as it can be seen; `units` reads it (`Store.units`)."""
    units = units or store.reader.units
    while len(chunk := units(topic, queue_id, offset, _CHUNK_UNITS)):
        for position, size, code in UNIT.iter_unpack(chunk):
            view = None if size == BLANK_SIZE else store.reader.view_at(position)
            yield Entry(offset, position, code, read_record(view))
            offset += 1


_kept_name: Final = lru_cache(maxsize=4096)(partial(str, encoding="utf-8", errors="replace"))


def topic_name(name: bytes) -> str:
    """Return the topic that a property's bytes name. Names that a topic may have are kept."""
    if len(name) > RETRY_TOPIC_LENGTH_MAX:
        return name.decode("utf-8", "replace")
    return _kept_name(name)


Gate = Callable[[Record], Callable[[int], object] | None]
"""Asked before a message goes to its topic: who is told of its offset there; None: it goes
nowhere."""


class Redelivery:
    """Puts due messages into their own topics. What has been put is visible after the turn:
    `finish` ends it and says whether it succeeded. When it did not, nothing was delivered and the
    caller tries again. `gates` are those of topics; what is `elsewhere` is not put."""

    def __init__(
        self, store: Store, group_commit: GroupCommit, elsewhere: Elsewhere | None = None
    ) -> None:
        self._append = store.writer.append
        self._elsewhere = elsewhere or Elsewhere()
        self.finish = group_commit.commit_now
        self.gates: dict[str, Gate] = {}

    def put(self, record: Record, added: bytes = b"") -> str | None:
        """Append the message to its real topic, with more properties; returns the topic. HOT.

        None when it cannot be stored there, now or ever: the reason is logged. Raises StoreError
        when the store takes nothing at the moment.
        """
        properties = record.properties
        name = text.value_of(properties, REAL_TOPIC)
        queue_id = natural(text.value_of(properties, REAL_QUEUE) or b"")
        if name is None or queue_id is None:
            log.error("a message that is due says not where it belongs: it is passed over")
            return None
        topic = topic_name(name)
        if is_send_forbidden_topic(topic):
            log.error("a message that is due belongs to %s: it is passed over", topic)
            return None
        gate = self.gates.get(topic)
        told = gate(record) if gate is not None else None
        if gate is not None and told is None:
            return topic
        offset = self.copy(record, topic, queue_id, added, record.reconsume_times)
        if offset is not None and told is not None:
            told(offset)
        return None if offset is None else topic

    def copy(
        self, record: Record, topic: str, queue_id: int, added: bytes, reconsume_times: int
    ) -> int | None:
        """Append the message to a queue, with more properties where there is room; returns its
        offset, NOWHERE when another master has it. HOT. None when it can never be stored there,
        StoreError as `put`."""
        properties = record.properties
        if self._elsewhere.left and self._elsewhere.took(topic, record.text(UNIQ_KEY)):
            return NOWHERE
        if added and len(properties) + len(added) < PROPERTIES_BYTES_MAX:
            properties += added if properties[-1:] == b"\x02" else b"\x02" + added
        try:
            _, offset = self._append(
                topic, queue_id, record.body, properties, text.tag_code_of(properties),
                record.flag, record.sys_flag, record.born_time_ms, record.born_host,
                record.store_host, reconsume_times,
            )  # fmt: skip
        except MessageIllegalError as error:
            log.error("a message that is due cannot be stored in %s: %s", topic, error)
            return None
        return offset
